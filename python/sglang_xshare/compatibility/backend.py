"""The MoE runner that `--moe-runner-backend auto` becomes under a policy: SGLang's choice, or one that fits the policy.

SGLang first resolves a copy of the arguments, without a log line. If SGLang chooses a runner that does not serve the
policy, the arguments get another runner before their own resolution, as if the user had given that runner. So
everything that SGLang derives from the runner fits. Without a policy nothing here runs.
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
"""The attribute of `ServerArgs` with --moe-runner-backend as given, which SGLang before 0.5.20 overwrites."""


def choose_runner(server_args: Any, arguments: Arguments) -> None:
    """Replace, and log, the MoE runner that SGLang would choose for `auto` if that runner does not serve the policy.

    The new runner must fit the experts. Call before SGLang resolves a server's arguments. This function refuses
    nothing, because later checks do.
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
    """Return whether the user has named a MoE runner."""
    return getattr(server_args, GIVEN, spell(server_args.moe_runner_backend)) != "auto"


def check_experts(server_args: Any) -> None:
    """Raise `ExpertPolicyError` for a resolved server whose experts' kernel cannot follow a policy."""
    experts = read_experts(server_args)
    if experts is None or experts.served:
        return
    if is_given(server_args):
        given = spell(resolved(server_args).moe_runner_backend)
        if given not in list_runners():  # `check_modes` refuses a runner that is never served
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
    """Return (how the server would run its experts, whether that serves the policy), with `runner` if given.

    The first value is None without a GPU, and if SGLang refuses the arguments, which the server's own start reports.
    """
    record = copy.deepcopy(server_args)
    if runner is not None:
        declare(record, moe_runner_backend=runner)
    with _unnoticed():
        try:
            record.resolve_once() if hasattr(record, "resolve_once") else record.__post_init__()
            model = model_config(record)
        except (Exception, SystemExit):  # whatever SGLang raises
            return None, False
        experts = read_experts(record)
        if experts is None or not experts.served:
            return experts, False
        try:  # some runners take only some schedules
            check_schedule(arguments.schedule, read_model(model, record.model_path), resolved(record))
        except ExpertPolicyError:
            return experts, False
    return experts, True


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Resolve arguments without a log line, without our hooks, and without a change of the environment."""
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
