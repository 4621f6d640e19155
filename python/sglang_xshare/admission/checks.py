"""What a server is checked for as it starts, in order: a server is refused by the first that refuses, `sglang-xshare
check` tells all. What only loaded weights show is checked in `layers.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..affinity import is_asked
from ..affinity.arguments import FLAG, AffinityArguments, check_affinity, read_affinity
from ..patching.errors import PatchError
from ..patching.status import check_patched
from ..refusal import ExpertPolicyError
from ..stage.upstream.server import model_config, resolved, spell
from .all_to_all import check_model
from .arguments import Arguments, read_arguments
from .backend import check_experts, choose_runner, is_given
from .draft import check_draft, check_draft_tokens
from .expert_placement import check_placement, set_placement
from .model import check_attention, check_heads, check_path, check_schedule, check_weights
from .modes import check_modes, check_observed, check_writers
from .moe_model import MoeModel, read_model
from .paging import check_paging

logger = logging.getLogger(__name__)

GIVEN, RESOLVED, STARTED = "given", "resolved", "started"
"""Before SGLang resolves the arguments, whose own errors are tracebacks; after, before weights load; and then, of a
server that starts here: `sglang-xshare check` tells of servers that start elsewhere, and leaves these out.
"""
PLACEMENT, STAGE, AFFINITY, ANY = "placement", "stage", "affinity", "any"
"""Parts of the arguments: `--expert-placement`; a policy or masked padding rows; expert-affinity dispatch; whatever
they are, as `sglang-xshare check` judges servers without a flag of ours too.
"""


class Start:
    """A server's start, as far as checks ask for it: each part is read once, when it is first asked for.

    `refused` has the names of the checks that have refused it.
    """

    def __init__(self, server_args: Any) -> None:
        self.server_args = server_args
        self.refused: set[str] = set()

    def asks(self, part: str) -> bool:
        """Whether the server is started with this part."""
        if part == ANY:
            return True
        if part == PLACEMENT:
            return self.get("expert_placement") is not None
        return is_asked(self.server_args) if part == AFFINITY else self.parsed is not None

    def get(self, name: str) -> Any:
        """An argument as it was given; None of a release that does not have it."""
        return getattr(self.server_args, name, None)

    @cached_property
    def parsed(self) -> Arguments | ExpertPolicyError | None:
        """The stage's flags, or why they make no schedule; None where the stage is off."""
        try:
            return read_arguments(self.server_args)
        except ExpertPolicyError as error:
            return error

    @property
    def arguments(self) -> Arguments:
        """The stage's flags; where they make no schedule, those that any policy is checked with."""
        return self.parsed if isinstance(self.parsed, Arguments) else Arguments(None)

    @cached_property
    def affinity(self) -> AffinityArguments:
        """The flags of expert-affinity dispatch. Raises `ExpertPolicyError`."""
        arguments = read_affinity(self.server_args)
        assert arguments is not None, "no flag of it is given"
        return arguments

    @cached_property
    def config(self) -> Any:
        """The resolved arguments."""
        return resolved(self.server_args)

    @cached_property
    def loaded(self) -> Any:
        """The `ModelConfig` that resolution has read."""
        return model_config(self.server_args)

    @cached_property
    def model(self) -> MoeModel:
        """What a schedule must fit of it. Raises `ExpertPolicyError`."""
        return read_model(self.loaded, self.server_args.model_path)


@dataclass(frozen=True)
class Check:
    """`run` raises `ExpertPolicyError` for a start that has the part `of`. It is left out after a refusal by the check
    that `after` names, without which it could say nothing.
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
    _check_tree("--expert-policy" if start.get("expert_policy") else "--mask-padding-experts")


def _check_tree(flag: str) -> None:
    """Raise `ExpertPolicyError` unless the SGLang that runs is wholly patched by this version of the queue, for the
    `flag` that needs it.
    """
    try:
        check_patched()
    except PatchError as error:
        raise ExpertPolicyError(flag, None, str(error)) from None


def _check_schedule(start: Start) -> None:
    names_runner = is_given(start.server_args)
    _, warnings = check_schedule(start.arguments.schedule, start.model, start.config, names_runner)
    for warning in warnings:
        logger.warning(warning)


CHECKS = (
    # No placement, or flags that place experts otherwise. Sets those that make it.
    Check("placement", GIVEN, PLACEMENT, lambda start: set_placement(start.server_args)),
    # A policy, keys, a trace or flags beside them that make no schedule; every plan it can give is built.
    Check("policy", GIVEN, STAGE, _check_policy),
    # A --model-path that can only mean a folder, and is none.
    Check("path", GIVEN, STAGE, lambda start: check_path(start.get("model_path"))),
    # An SGLang that is not wholly patched, by this version of the queue.
    Check("tree", GIVEN, STAGE, _check_patched),
    # Modes, devices and backends that the stage is not served with.
    Check("given modes", GIVEN, STAGE, lambda start: check_modes(start.server_args)),
    # Nothing: sets the MoE runner where SGLang's own choice would be none that the policy is served with.
    Check("runner", GIVEN, STAGE, lambda start: choose_runner(start.server_args, start.arguments)),
    # Flags of affinity without each other, values that are not allowed, a file that is no table.
    Check("affinity", GIVEN, AFFINITY, lambda start: start.affinity),
    # As above, for affinity.
    Check("affinity's tree", GIVEN, AFFINITY, lambda start: _check_tree(FLAG), after="affinity"),
    # --------------------------------------------------------------------------------- SGLang resolves its arguments
    # What `policy` does, of flags that were read again: a pipe is empty by then, and a file may be gone.
    Check("policy again", RESOLVED, STAGE, _check_policy, after="policy"),
    # Ranks that do not divide the model's experts or heads, or slices that end within quantized blocks.
    Check("ranks", RESOLVED, PLACEMENT, lambda start: check_placement(start.server_args), after="placement"),
    # Ranks that do not divide the model's heads or an expert's columns.
    Check("heads", RESOLVED, ANY, lambda start: check_heads(start.config, start.loaded.hf_text_config)),
    # What `given modes` does, of what SGLang has made of them.
    Check("modes", RESOLVED, STAGE, lambda start: check_modes(start.config, is_given(start.server_args))),
    # Experts of a quantization that SGLang runs with no MoE runner that takes a policy's choice.
    Check("experts", RESOLVED, STAGE, lambda start: check_experts(start.server_args)),
    # A dense model, one whose layers differ in experts, one known not to be served.
    Check("model", RESOLVED, STAGE, lambda start: start.model),
    # A model that SGLang is not known to serve with data-parallel attention, where that is asked for.
    Check("attention", RESOLVED, STAGE, lambda start: check_attention(start.model, start.config), after="model"),
    # The same of an all-to-all backend.
    Check("all-to-all", RESOLVED, STAGE, lambda start: check_model(start.model, start.config), after="model"),
    # A draft that is missing, or of another vocabulary or width than its target's.
    Check("draft", RESOLVED, STAGE, lambda start: check_draft(start.config, start.loaded.hf_text_config)),
    # Draft tokens of a request that do not fill the rows which ranks are padded to.
    Check("draft tokens", RESOLVED, STAGE, lambda start: check_draft_tokens(start.config)),
    # `observe` where layers are not handed whole logits.
    Check("observe", RESOLVED, STAGE, lambda start: check_observed(start.arguments.schedule)),
    # A trace that several replicas would write.
    Check("trace", RESOLVED, STAGE, lambda start: check_writers(start.arguments.trace, start.config)),
    # Paged experts on more than one GPU, with speculation, or with fewer slots than a row takes experts.
    Check("paging", RESOLVED, STAGE, lambda start: check_paging(start.config, start.model), after="model"),
    # A schedule that does not fit the model, the batch sizes or the MoE runner. Warns of budgets without an effect.
    Check("schedule", RESOLVED, STAGE, _check_schedule, after="model"),
    # Replicas that are none or on several machines, servers that do not tell what ended, a table of another model.
    Check(
        "affinity's server",
        RESOLVED,
        AFFINITY,
        lambda start: check_affinity(start.server_args, start.affinity),
        after="affinity",
    ),
    # ---------------------------------------------------------------------------------------------- a server starts
    # A model's folder without weights.
    Check(
        "weights", STARTED, STAGE, lambda start: check_weights(start.get("model_path"), spell(start.config.load_format))
    ),
)


def find_refusals(start: Start, when: str) -> Iterator[ExpertPolicyError]:
    """What refuses a server at this point of its start, in order; a check is made when its answer is asked for."""
    for check in CHECKS:
        if check.when == when and check.after not in start.refused and start.asks(check.of):
            try:
                check.run(start)
            except ExpertPolicyError as error:
                start.refused.add(check.name)
                yield error
