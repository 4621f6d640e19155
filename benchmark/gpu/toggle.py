"""Two sets of decode graphs in one dummy server: upstream's own, and the policy's. `POST /expert_policy` swaps them.

A graph that was captured under a policy keeps the selection kernel. After a switch to vanilla its replays still select,
with numbers that give each row its own top-k (`stage/graphs.py`), so the baseline would pay for the selection in every
layer. So this server captures its graphs twice: under the policy, then without the stage around the model. Weights, KV
cache, process and static buffers are the same in both.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

TOGGLED = "SGLANG_XSHARE_TOGGLED"
"""The environment variable that makes a dummy server capture its graphs twice, when it is 1."""

logger = logging.getLogger(__name__)


class Toggle:
    """The forwards and the decode graphs of a model runner, with the policy's stage around them and without it."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        model = runner.model
        self._selecting = runner.decode_cuda_graph_runner, runner.forward, model.forward
        # `functools.wraps` keeps what the stage has wrapped.
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
        """Return whether this pair still has the policy's graphs: a switch may have captured them again."""
        return self.runner.decode_cuda_graph_runner is self._selecting[0]

    def take(self, selecting: bool) -> None:
        """Serve with the policy's graphs from the next step on, or with upstream's own."""
        taken = self._selecting if selecting else self._plain
        self.runner.decode_cuda_graph_runner, self.runner.forward, self.runner.model.forward = taken


def capture_again(runner: Any) -> None:
    """Capture a second set of decode graphs on the static attention buffers of the first.

    `init_cuda_graph_state` would allocate new buffers, and the first set's replays would read the freed ones.
    """
    backend = runner.attn_backend
    backend.init_cuda_graph_state = lambda *args, **kwargs: None
    try:
        runner.init_decode_cuda_graph()
    finally:
        del backend.init_cuda_graph_state


def install() -> None:
    """Make every target model's runner with a stage capture both sets, and every switch take one of them."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_xshare.live import control

    capture: Callable[..., Any] = ModelRunner.init_cuda_graphs
    switch = control.switch
    toggles: list[Toggle] = []

    @functools.wraps(capture)
    def capture_both(runner: Any, *args: Any, **kwargs: Any) -> None:
        capture(runner, *args, **kwargs)
        # The stage sets the runner's forward. A draft model has no stage; without graphs there is no set to repeat.
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
            # A capture replaces the static attention buffers, which both sets share.
            toggles[:] = [toggle if toggle.is_current else Toggle(toggle.runner) for toggle in toggles]
            for toggle in toggles:
                toggle.take(selecting=reports.stage.in_force.schedule is not None)

    ModelRunner.init_cuda_graphs = capture_both
    control.switch = switch_graphs
