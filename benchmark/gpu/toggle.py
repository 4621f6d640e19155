"""A dummy server with two sets of decode graphs: one with the policy and one without it.

A graph that was captured under a policy always contains the selection kernel. After a switch to vanilla, the graph
still runs the kernel, with parameters that give each row its own top-k (`stage/graphs.py`). So the baseline would be
slower than a server without a policy. For this reason, the server captures its graphs twice, and `POST /expert_policy`
swaps the two sets. Both sets share the weights, the KV cache, the process and the static buffers.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

TOGGLED = "SGLANG_XSHARE_TOGGLED"
"""The environment variable that must be 1 if a dummy server should capture its graphs twice."""

logger = logging.getLogger(__name__)


class Toggle:
    """The two sets of forward functions and decode graphs of a model runner: with the policy and without it."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        model = runner.model
        self._selecting = runner.decode_cuda_graph_runner, runner.forward, model.forward
        # `functools.wraps` stores the original functions that the stage has wrapped.
        plain = runner.forward.__wrapped__, model.forward.__wrapped__
        runner.forward, model.forward = plain
        runner.decode_cuda_graph_runner = None
        try:
            capture_again(runner)
            self._plain = runner.decode_cuda_graph_runner, *plain
        finally:
            self.take(selecting=True)

    @property
    def is_current(self) -> bool:
        """Return whether the runner still uses this object's graphs. A policy switch can capture new graphs."""
        return self.runner.decode_cuda_graph_runner is self._selecting[0]

    def take(self, selecting: bool) -> None:
        """Use the graphs with the policy from the next step on, or the graphs without it."""
        taken = self._selecting if selecting else self._plain
        self.runner.decode_cuda_graph_runner, self.runner.forward, self.runner.model.forward = taken


def capture_again(runner: Any) -> None:
    """Capture a second set of decode graphs that uses the static attention buffers of the first set.

    `init_cuda_graph_state` would allocate new buffers. Then the first set of graphs would read freed memory.
    """
    backend = runner.attn_backend
    backend.init_cuda_graph_state = lambda *args, **kwargs: None
    try:
        runner.init_decode_cuda_graph()
    finally:
        del backend.init_cuda_graph_state


def install() -> None:
    """Patch SGLang so that model runners with a stage capture both sets, and policy switches choose between them."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_xshare.live import control

    capture: Callable[..., Any] = ModelRunner.init_cuda_graphs
    switch = control.switch
    toggles: list[Toggle] = []

    @functools.wraps(capture)
    def capture_both(runner: Any, *args: Any, **kwargs: Any) -> None:
        capture(runner, *args, **kwargs)
        # Only runners with a stage have their own `forward`, and a draft model has no stage. A runner without graphs
        # is skipped too.
        if "forward" in vars(runner) and hasattr(runner.decode_cuda_graph_runner, "capture_bs"):
            toggles.append(Toggle(runner))
            logger.info("Captured decode graphs twice: under the policy, and without it")

    @functools.wraps(switch)
    def switch_graphs(reports: Any, *args: Any, **kwargs: Any) -> float | None:
        for toggle in toggles:
            toggle.take(selecting=True)
        try:
            return switch(reports, *args, **kwargs)
        finally:
            # A new capture replaces the static attention buffers that both sets share. Then `Toggle` also captures the
            # set without the policy again.
            toggles[:] = [toggle if toggle.is_current else Toggle(toggle.runner) for toggle in toggles]
            for toggle in toggles:
                toggle.take(selecting=reports.stage.in_force.schedule is not None)

    ModelRunner.init_cuda_graphs = capture_both
    control.switch = switch_graphs
