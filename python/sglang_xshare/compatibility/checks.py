"""The checks that run when a server starts, and the settings that the server then changes.

A server stops at the first refusal, but `sglang-xshare check` reports all refusals. `layers.py` contains the checks
that need a loaded model.
"""

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..affinity import is_asked
from ..affinity.arguments import FLAG, check_affinity, read_affinity
from ..affinity.table import Table
from ..patching.engine import check_patched
from ..patching.tree import PatchError
from ..refusal import ExpertPolicyError
from ..upstream.server import is_switched_on, model_config, resolved
from .all_to_all import check_model
from .architectures import FUSED_FRONTS
from .arguments import Arguments, read_arguments
from .backend import check_experts, choose_runner, is_given
from .drafts import FLAG as DEPTH_FLAG
from .drafts import check_adapts, check_depth
from .drafts import is_asked as asks_depth
from .expert_placement import check_division, check_placement, set_placement
from .modes import check_draft_tokens, check_modes, check_observed, check_writers
from .moe_model import MoeModel, check_attention, read_model
from .schedule import check_schedule

PLACEMENT, STAGE, AFFINITY, DEPTH = "placement", "stage", "affinity", "depth"
"""The features that a server can use. Each check belongs to one feature.

- `PLACEMENT`: the flag `--expert-placement`
- `STAGE`: an expert policy or masked padding rows
- `AFFINITY`: expert-affinity dispatch
- `DEPTH`: the choice of the draft depth by tokens per second
"""
logger = logging.getLogger(__name__)
GIVEN, RESOLVED = "given", "resolved"
"""The two points in time at which checks run.

`GIVEN` checks run before SGLang resolves the arguments, because SGLang reports wrong arguments with a traceback.
`RESOLVED` checks run after SGLang has resolved the arguments and before the weights load.
"""


class Start:
    """The arguments and the model of a server that starts. Each property is computed when it is first used.

    `refused` contains the names of the checks that have refused the server.
    """

    def __init__(self, server_args: Any) -> None:
        self.server_args = server_args
        self.refused: set[str] = set()

    def asks(self, part: str) -> bool:
        """Return whether the server uses a feature: `PLACEMENT`, `STAGE`, `AFFINITY` or `DEPTH`."""
        if part == PLACEMENT:
            return getattr(self.server_args, "expert_placement", None) is not None
        if part == DEPTH:
            return asks_depth(self.server_args)
        return is_asked(self.server_args) if part == AFFINITY else self.parsed is not None

    @cached_property
    def parsed(self) -> Arguments | ExpertPolicyError | None:
        """Return the parsed flags of the expert-selection stage, or the error if a flag is wrong.

        Return None if the stage is off.
        """
        try:
            return read_arguments(self.server_args)
        except ExpertPolicyError as error:
            return error

    @property
    def arguments(self) -> Arguments:
        """Return the parsed flags of the expert-selection stage. If a flag is wrong, the schedule is None."""
        return self.parsed if isinstance(self.parsed, Arguments) else Arguments(None)

    @cached_property
    def table(self) -> Table:
        """Return the table for expert-affinity dispatch. Raises `ExpertPolicyError` if a flag or the table is wrong."""
        return read_affinity(self.server_args)[0]

    @cached_property
    def config(self) -> Any:
        """Return the arguments that SGLang has resolved."""
        return resolved(self.server_args)

    @cached_property
    def model(self) -> MoeModel:
        """Return the properties of the model. Raises `ExpertPolicyError` if the model is not supported."""
        return read_model(model_config(self.server_args), self.server_args.model_path)


@dataclass(frozen=True)
class Check:
    """A check of a server. Its function `run` raises `ExpertPolicyError` to refuse the server.

    `when` is `GIVEN` or `RESOLVED`. `of` names a feature of this project, and the check runs only if the server uses
    this feature. `after` is the name of an earlier check. If the earlier check has refused the server, this check is
    skipped.
    """

    name: str
    when: str
    of: str
    run: Callable[[Start], object]
    after: str | None = None


def _check_policy(start: Start) -> None:
    if isinstance(start.parsed, ExpertPolicyError):
        raise start.parsed


def _check_patched(start: Start) -> None:
    _check_tree("--expert-policy" if getattr(start.server_args, "expert_policy", None) else "--mask-padding-experts")


def _check_tree(flag: str) -> None:
    """Raise `ExpertPolicyError`, which names `flag`, unless SGLang has all patches of this version."""
    try:
        check_patched()
    except PatchError as error:
        raise ExpertPolicyError(flag, None, str(error)) from None


def _check_schedule(start: Start) -> None:
    for warning in check_schedule(start.arguments.schedule, start.model, start.config, is_given(start.server_args))[1]:
        logger.warning(warning)


# The comment above a check describes what the check refuses.
CHECKS = (
    # Wrong values of --expert-policy and its related flags. This check also builds every plan of the schedule.
    Check("policy", GIVEN, STAGE, _check_policy),
    # An installation of SGLang that lacks patches of this version.
    Check("tree", GIVEN, STAGE, _check_patched),
    # Modes, devices and backends that do not support the expert-selection stage.
    Check("given modes", GIVEN, STAGE, lambda start: check_modes(start.server_args)),
    # Incomplete or wrong flags for expert-affinity dispatch, and a file that does not contain a table.
    Check("affinity", GIVEN, AFFINITY, lambda start: start.table),
    Check("affinity's tree", GIVEN, AFFINITY, lambda start: _check_tree(FLAG), after="affinity"),
    # Unknown values of --expert-placement, and flags that place experts in another way.
    Check("placement", GIVEN, PLACEMENT, lambda start: check_division(start.server_args)),
    # The flag for the draft depth without --speculative-adaptive, trees of drafts, and wrong candidate depths.
    Check("depth", GIVEN, DEPTH, lambda start: check_depth(start.server_args)),
    # The same as "tree", for the flag of the draft depth.
    Check("depth's tree", GIVEN, DEPTH, lambda start: _check_tree(DEPTH_FLAG), after="depth"),
    # --------------------------------------------------------------------------------- SGLang resolves its arguments
    # The same as "policy". Before 0.5.20, SGLang writes the resolved flags for speculation into the given arguments.
    Check("policy again", RESOLVED, STAGE, _check_policy, after="policy"),
    # Drafters and modes for which SGLang does not adapt the draft depth.
    Check("adapts", RESOLVED, DEPTH, lambda start: check_adapts(start.server_args, start.config), after="depth"),
    # A number of ranks that does not divide the model's experts or heads. Slices that end within a quantized block.
    Check("ranks", RESOLVED, PLACEMENT, lambda start: check_placement(start.server_args), after="placement"),
    Check("modes", RESOLVED, STAGE, lambda start: check_modes(start.config, is_given(start.server_args))),
    # Experts that run with a kernel that does not support a policy.
    Check("experts", RESOLVED, STAGE, lambda start: check_experts(start.server_args)),
    # A dense model, a model whose layers have different numbers of experts, or a model class that is not supported.
    Check("model", RESOLVED, STAGE, lambda start: start.model),
    # A model that is not known to support data-parallel attention, or the all-to-all backend.
    Check("attention", RESOLVED, STAGE, lambda start: check_attention(start.model, start.config), after="model"),
    Check("all-to-all", RESOLVED, STAGE, lambda start: check_model(start.model, start.config), after="model"),
    # A number of draft tokens with which SGLang's padding would split the rows of a request.
    Check("draft tokens", RESOLVED, STAGE, lambda start: check_draft_tokens(start.config)),
    # The policy `observe` if SGLang may give the layers partial sums of their logits.
    Check("observe", RESOLVED, STAGE, lambda start: check_observed(start.arguments.schedule)),
    Check("trace", RESOLVED, STAGE, lambda start: check_writers(start.arguments.trace, start.config)),
    # A schedule that does not fit the model, the batch sizes or the MoE runner.
    Check("schedule", RESOLVED, STAGE, _check_schedule, after="model"),
    # A single replica, data-parallel attention, replicas on several machines, PD disaggregation, a server that does not
    # report finished requests, and a table of another model.
    Check("replicas", RESOLVED, AFFINITY, lambda start: check_affinity(start.server_args, start.table), "affinity"),
)


def find_refusals(start: Start, when: str) -> Iterator[ExpertPolicyError]:
    """Run the `GIVEN` or the `RESOLVED` checks in order, and yield their refusals.

    The next check runs only when the caller requests the next refusal.
    """
    for check in CHECKS:
        if check.when == when and check.after not in start.refused and start.asks(check.of):
            try:
                check.run(start)
            except ExpertPolicyError as error:
                start.refused.add(check.name)
                yield error


def set_arguments(start: Start) -> None:
    """Set the arguments for --expert-placement, and choose another MoE runner if SGLang's choice is not supported.

    If a check has refused the placement, the placement's arguments are not set. A runner that the user has chosen is
    not replaced.
    """
    if start.asks(PLACEMENT) and "placement" not in start.refused:
        set_placement(start.server_args)
    if start.asks(STAGE):
        choose_runner(start.server_args, start.arguments)


FRONT = "SGLANG_K3_FUSED_FRONT"


def set_environment(start: Start) -> None:
    """Turn off the fused kernel of Kimi K3, which computes gate and TopK without the policy. Log the change.

    Call this function before SGLang starts other processes.
    """
    if start.asks(STAGE) and start.model.architecture in FUSED_FRONTS and is_switched_on(FRONT):
        os.environ[FRONT] = "0"
        logger.warning("expert policy: %s -> 0, because otherwise one kernel computes gate and TopK", FRONT)
