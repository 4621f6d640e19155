"""The checks of a server's start, in order, and what is set after them.

The first refusal ends a server; `sglang-xshare check` reports all refusals. `layers.py` checks what only loaded weights
show.
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
"""Parts of the arguments: `--expert-placement`; a policy or masked padding rows; expert-affinity dispatch; draft depths
by tokens per second.
"""
logger = logging.getLogger(__name__)
GIVEN, RESOLVED = "given", "resolved"
"""Points of a start: before SGLang resolves the arguments (its own errors are tracebacks), and before weights load."""


class Start:
    """A server's start, each part read at its first use. `refused`: names of checks that have refused the server."""

    def __init__(self, server_args: Any) -> None:
        self.server_args = server_args
        self.refused: set[str] = set()

    def asks(self, part: str) -> bool:
        """Return whether the server is started with this part."""
        if part == PLACEMENT:
            return getattr(self.server_args, "expert_placement", None) is not None
        if part == DEPTH:
            return asks_depth(self.server_args)
        return is_asked(self.server_args) if part == AFFINITY else self.parsed is not None

    @cached_property
    def parsed(self) -> Arguments | ExpertPolicyError | None:
        """Return the stage's flags, or their refusal; None if the stage is off."""
        try:
            return read_arguments(self.server_args)
        except ExpertPolicyError as error:
            return error

    @property
    def arguments(self) -> Arguments:
        """Return the stage's flags, without a schedule if they are refused."""
        return self.parsed if isinstance(self.parsed, Arguments) else Arguments(None)

    @cached_property
    def table(self) -> Table:
        """Return the table of expert-affinity dispatch. Raises `ExpertPolicyError`."""
        return read_affinity(self.server_args)[0]

    @cached_property
    def config(self) -> Any:
        """Return the resolved arguments."""
        return resolved(self.server_args)

    @cached_property
    def model(self) -> MoeModel:
        """Return the model, which a schedule must fit. Raises `ExpertPolicyError`."""
        return read_model(model_config(self.server_args), self.server_args.model_path)


@dataclass(frozen=True)
class Check:
    """A check of the part `of`: `run` raises `ExpertPolicyError`. A check whose `after` has refused is skipped."""

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
    """Raise `ExpertPolicyError` for `flag` unless this SGLang is wholly patched by this version of the queue."""
    try:
        check_patched()
    except PatchError as error:
        raise ExpertPolicyError(flag, None, str(error)) from None


def _check_schedule(start: Start) -> None:
    for warning in check_schedule(start.arguments.schedule, start.model, start.config, is_given(start.server_args))[1]:
        logger.warning(warning)


# The comment on a check names what the check refuses.
CHECKS = (
    # A policy, keys, a trace or related flags that make no schedule; every plan of a schedule is built here.
    Check("policy", GIVEN, STAGE, _check_policy),
    # An SGLang that is not wholly patched by this version of the queue.
    Check("tree", GIVEN, STAGE, _check_patched),
    # Modes, devices and backends that the stage is not served with.
    Check("given modes", GIVEN, STAGE, lambda start: check_modes(start.server_args)),
    # Flags of affinity without the flag that they need, wrong values, a file that is no table.
    Check("affinity", GIVEN, AFFINITY, lambda start: start.table),
    Check("affinity's tree", GIVEN, AFFINITY, lambda start: _check_tree(FLAG), after="affinity"),
    # A value that is no placement, and flags that place experts in another way.
    Check("placement", GIVEN, PLACEMENT, lambda start: check_division(start.server_args)),
    # Draft depths without drafts that adapt, trees of drafts, invalid candidates.
    Check("depth", GIVEN, DEPTH, lambda start: check_depth(start.server_args)),
    # As "tree", for draft depths.
    Check("depth's tree", GIVEN, DEPTH, lambda start: _check_tree(DEPTH_FLAG), after="depth"),
    # --------------------------------------------------------------------------------- SGLang resolves its arguments
    # `policy` with the flags that SGLang has resolved: speculation, paging.
    Check("policy again", RESOLVED, STAGE, _check_policy, after="policy"),
    # Drafters and modes whose drafts SGLang does not adapt.
    Check("adapts", RESOLVED, DEPTH, lambda start: check_adapts(start.server_args, start.config), after="depth"),
    # Ranks that do not divide the model's experts or heads, or slices that end within quantized blocks.
    Check("ranks", RESOLVED, PLACEMENT, lambda start: check_placement(start.server_args), after="placement"),
    Check("modes", RESOLVED, STAGE, lambda start: check_modes(start.config, is_given(start.server_args))),
    # Experts of a quantization without an MoE runner that can follow a policy.
    Check("experts", RESOLVED, STAGE, lambda start: check_experts(start.server_args)),
    # A dense model, a model whose layers differ in experts, or a model that is known not to be served.
    Check("model", RESOLVED, STAGE, lambda start: start.model),
    # A model that SGLang is not known to serve with data-parallel attention, or with an all-to-all backend.
    Check("attention", RESOLVED, STAGE, lambda start: check_attention(start.model, start.config), after="model"),
    Check("all-to-all", RESOLVED, STAGE, lambda start: check_model(start.model, start.config), after="model"),
    # Draft tokens of a request that padding to a multiple of the ranks would split.
    Check("draft tokens", RESOLVED, STAGE, lambda start: check_draft_tokens(start.config)),
    # `observe` if layers do not get whole logits.
    Check("observe", RESOLVED, STAGE, lambda start: check_observed(start.arguments.schedule)),
    Check("trace", RESOLVED, STAGE, lambda start: check_writers(start.arguments.trace, start.config)),
    # A schedule that does not fit the model, the batch sizes or the MoE runner.
    Check("schedule", RESOLVED, STAGE, _check_schedule, after="model"),
    # No replicas or replicas on several machines, servers that do not report what ended, a table of another model.
    Check("replicas", RESOLVED, AFFINITY, lambda start: check_affinity(start.server_args, start.table), "affinity"),
)


def find_refusals(start: Start, when: str) -> Iterator[ExpertPolicyError]:
    """Yield the refusals of a server at this point of its start, in order. A check runs only when its turn comes."""
    for check in CHECKS:
        if check.when == when and check.after not in start.refused and start.asks(check.of):
            try:
                check.run(start)
            except ExpertPolicyError as error:
                start.refused.add(check.name)
                yield error


def set_arguments(start: Start) -> None:
    """Set the flags of a placement, unless refused, and another MoE runner if SGLang's choice would not be served."""
    if start.asks(PLACEMENT) and "placement" not in start.refused:
        set_placement(start.server_args)
    if start.asks(STAGE):
        choose_runner(start.server_args, start.arguments)


FRONT = "SGLANG_K3_FUSED_FRONT"


def set_environment(start: Start) -> None:
    """Switch off, and log, the kernel that bypasses the layers' `TopK`. Call before SGLang starts other processes."""
    if start.asks(STAGE) and start.model.architecture in FUSED_FRONTS and is_switched_on(FRONT):
        os.environ[FRONT] = "0"
        logger.warning("expert policy: %s -> 0, because otherwise one kernel computes gate and TopK", FRONT)
