"""Which MoE runner `--moe-runner-backend auto` becomes under a policy: SGLang's choice, or one that fits the policy.

SGLang resolves a copy of the arguments first, unnoticed. Where that shows a runner that no policy is served with, the
record goes into its own resolution with another one, as if the user had given it, so that everything that SGLang
derives from the runner fits. Without a policy nothing here runs.
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
"""Where `ServerArgs` keeps --moe-runner-backend as given: before SGLang 0.5.20 resolution overwrites the argument."""


def choose_runner(server_args: Any, arguments: Arguments) -> None:
    """Before SGLang resolves a server's arguments: where it would turn `auto` into an MoE runner that the policy is not
    served with, and another fits, set that one and log it in one line. Refuses nothing: later checks do.
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
    """Whether the user has named a MoE runner."""
    return getattr(server_args, GIVEN, spell(server_args.moe_runner_backend)) != "auto"


def check_experts(server_args: Any) -> None:
    """Raise `ExpertPolicyError` for a resolved server that runs its experts as no policy can be served."""
    experts = read_experts(server_args)
    if experts is None or experts.served:
        return
    if is_given(server_args):
        if experts.runner in list_runners():  # one that is served with other experts; the rest `check_modes` refuses
            allowed = ", ".join(experts.list_fitting()) or "another quantization"
            reason = f"its kernel for such experts ({experts.format}) takes no policy's choice; allowed is {allowed}"
            raise refusal("--moe-runner-backend", experts.runner, reason)
        return
    policy = getattr(server_args, "expert_policy", None)
    flag = "--mask-padding-experts" if policy is None else "--expert-policy"
    allowed = "SGLANG_USE_AITER=0" if experts.aiter else "experts of another quantization"
    reason = f"SGLang runs {experts.format} experts with {experts.runner} here, which takes no policy's choice"
    fitting = f"none of {', '.join(list_runners())} fits them; allowed is {allowed}"
    raise ExpertPolicyError(flag, policy, f"{reason}, and {fitting}")


def _foresee(server_args: Any, arguments: Arguments, runner: str | None = None) -> tuple[Experts | None, bool]:
    """(how the server would run its experts, whether the policy can be served so), with another runner where one is
    named. None where SGLang does not resolve the arguments, which the server's own resolution says, and for no GPU.
    """
    record = copy.deepcopy(server_args)
    if runner is not None:
        declare(record, moe_runner_backend=runner)
    experts = None
    with _unnoticed():
        if not _resolve(record):
            return None, False
        try:
            experts = read_experts(record)
            if experts is None or not experts.served:
                return experts, False
            # Some runners take only some schedules.
            model = read_model(model_config(record), record.model_path)
            check_schedule(arguments.schedule, model, resolved(record))
        except ExpertPolicyError:
            return experts, False
    return experts, True


def _resolve(record: Any) -> bool:
    """Whether SGLang resolves these arguments and builds the model's configuration, which the record then keeps."""
    try:
        record.resolve_once() if hasattr(record, "resolve_once") else record.__post_init__()
        model_config(record)
    except (Exception, SystemExit):  # whatever it is, the server's own resolution comes to it and says it
        return False
    return True


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Within it a resolution logs nothing, calls no hook of ours, and leaves the environment as it was."""
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
