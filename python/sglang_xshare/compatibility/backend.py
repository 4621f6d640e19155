"""The choice of an MoE runner for a server with `--moe-runner-backend auto`.

This module first lets SGLang resolve a copy of the arguments, without log output. If SGLang chooses a runner that does
not support the policy, the module sets another runner before SGLang resolves the real arguments. SGLang treats this
runner as if the user had chosen it, so all settings that depend on the runner are consistent. If the expert-selection
stage is off, the module does nothing.
"""

import copy
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..refusal import ExpertPolicyError, refusal
from ..upstream.server import declare, model_config, resolved, spell
from .arguments import Arguments
from .experts import Experts, read_experts
from .moe_model import read_model
from .runners import list_runners
from .schedule import check_schedule

logger = logging.getLogger(__name__)

GIVEN = "_expert_policy_given_runner"
"""The attribute of `ServerArgs` for the user's --moe-runner-backend. Before 0.5.20 SGLang overwrites the flag."""


def choose_runner(server_args: Any, arguments: Arguments) -> None:
    """Choose another MoE runner if the runner that SGLang would choose does not support the policy.

    The function acts only if --moe-runner-backend is `auto`. The new runner supports the format of the experts'
    weights, and the change is logged. If no runner fits, the function changes nothing, and a later check refuses the
    server. Call the function before SGLang resolves the server's arguments.
    """
    setattr(server_args, GIVEN, spell(server_args.moe_runner_backend))
    if is_given(server_args) or server_args.device == "cpu":
        return
    found, fits = _foresee(server_args, arguments)
    if found is None or fits:
        return
    for runner in found.list_fitting():
        experts, fits = _foresee(server_args, arguments, runner)
        if experts is not None and fits and experts.runner == runner:
            declare(server_args, moe_runner_backend=runner)
            logger.warning("expert policy: MoE runner %s (auto) -> %s", found.runner, runner)
            return


def is_given(server_args: Any) -> bool:
    """Return whether the user has chosen an MoE runner."""
    return getattr(server_args, GIVEN, spell(server_args.moe_runner_backend)) != "auto"


def check_experts(server_args: Any) -> None:
    """Raise `ExpertPolicyError` if the server runs its experts with a kernel that does not support a policy.

    SGLang must have resolved the arguments.
    """
    experts = read_experts(server_args)
    if experts is None or experts.served:
        return
    if is_given(server_args):
        given = spell(resolved(server_args).moe_runner_backend)
        if given not in list_runners():  # `check_modes` refuses this runner
            return
        allowed = ", ".join(experts.list_fitting()) or "another quantization"
        reason = f"its kernel for such experts ({experts.format}) cannot follow a policy; use {allowed}"
        raise refusal("--moe-runner-backend", given, reason)
    policy = getattr(server_args, "expert_policy", None)
    flag = "--mask-padding-experts" if policy is None else "--expert-policy"
    allowed = "SGLANG_USE_AITER=0" if experts.aiter else "experts of another quantization"
    reason = f"SGLang runs {experts.format} experts with {experts.runner} here, which cannot follow a policy"
    fitting = f"none of {', '.join(list_runners())} fits them; use {allowed}"
    raise ExpertPolicyError(flag, policy, f"{reason}, and {fitting}")


def _foresee(server_args: Any, arguments: Arguments, runner: str | None = None) -> tuple[Experts | None, bool]:
    """Return how the server would run its experts, and whether it could then use the policy.

    If `runner` is given, it replaces --moe-runner-backend. The first value is None if `read_experts` returns None, or
    if SGLang refuses the arguments. The server reports such a refusal when it starts.
    """
    record = copy.deepcopy(server_args)
    if runner is not None:
        declare(record, moe_runner_backend=runner)
    with _unnoticed():
        try:
            record.resolve_once() if hasattr(record, "resolve_once") else record.__post_init__()
            model = model_config(record)
        except (Exception, SystemExit):  # SGLang may raise any error
            return None, False
        experts = read_experts(record)
        if experts is None or not experts.served:
            return experts, False
        try:  # some runners support only some schedules
            check_schedule(arguments.schedule, read_model(model, record.model_path), resolved(record))
        except ExpertPolicyError:
            return experts, False
    return experts, True


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Disable the log, warnings and our hooks inside the context. Restore environment variables at the end."""
    from sglang.srt import expert_policy

    hooks = {name: getattr(expert_policy, name) for name in ("check_flags", "check_server")}
    environment, level = dict(os.environ), logging.root.manager.disable
    logging.disable()
    vars(expert_policy).update(dict.fromkeys(hooks, lambda server_args: None))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        vars(expert_policy).update(hooks)
        logging.disable(level)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
