"""What is checked of a server, in order, once SGLang has resolved its arguments and before weights load."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ..policies.schedule import Schedule
from ..refusal import ExpertPolicyError, refusal
from ..stage.upstream.routing import hands_parts
from ..stage.upstream.server import attention_dp_size, model_config, resolved
from .all_to_all import check_model
from .arguments import Arguments
from .backend import check_experts, is_given
from .draft import check_draft, check_draft_tokens
from .model import MoeModel, check_attention, check_schedule, read_model
from .modes import check_aligned, check_modes

logger = logging.getLogger(__name__)


def check_server(server_args: Any, arguments: Arguments) -> None:
    """Raise `ExpertPolicyError` for a mode, a model, a draft or a schedule that cannot be served together; warn of a
    plan that never drops an expert.
    """
    for error in find_refusals(server_args, arguments):
        raise error


def find_refusals(server_args: Any, arguments: Arguments) -> Iterator[ExpertPolicyError]:
    """Every reason not to serve, the first of each kind, in order; each is looked for when it is asked for."""
    config = resolved(server_args)
    yield from _refused(partial(check_modes, config, is_given(server_args)))
    yield from _refused(partial(check_experts, server_args))
    if arguments.align:
        yield from _refused(partial(check_aligned, config))
    loaded = model_config(server_args)
    try:
        model = read_model(loaded, server_args.model_path)
    except ExpertPolicyError as error:
        yield error
        return
    yield from _refused(partial(check_attention, model, config))
    yield from _refused(partial(check_model, model, config))
    yield from _refused(partial(check_draft, config, loaded.hf_text_config))
    yield from _refused(partial(check_draft_tokens, config))
    yield from _refused(partial(check_observed, arguments.schedule))
    if arguments.trace is not None and config.dp_size > 1 and attention_dp_size(config) == 1:
        yield refusal(
            "--expert-policy-trace", arguments.trace, f"{config.dp_size} replicas would write it; allowed is one"
        )
    yield from _refused(partial(_check_schedule, arguments, model, config, is_given(server_args)))


def check_observed(schedule: Schedule | None) -> None:
    """Raise `ExpertPolicyError` where layers are not handed the logits that plans of `observe` would look at."""
    if schedule is not None and schedule.observed and hands_parts():
        reason = (
            "on AMD this SGLang may hand a layer the parts of its logits, and add them up later; allowed is another"
        )
        raise refusal("--expert-policy", schedule.policy, reason)


def _refused(check: Callable[[], None]) -> Iterator[ExpertPolicyError]:
    try:
        check()
    except ExpertPolicyError as error:
        yield error


def _check_schedule(arguments: Arguments, model: MoeModel, config: Any, names_runner: bool) -> None:
    _, warnings = check_schedule(arguments.schedule, model, config, names_runner)
    for warning in warnings:
        logger.warning(warning)
