"""The parsed flags of the expert-selection stage: `--expert-policy`, related flags, and `--mask-padding-experts`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..files import read_json, try_file
from ..policies.common import SPECULATES
from ..policies.keys import as_json, read_object
from ..policies.schedule import Schedule, build_schedule
from ..policies.spelling import parse_policy
from ..refusal import ExpertPolicyError
from ..upstream.server import is_speculative, pages_experts

KEYS = "_expert_policy_keys"
"""The attribute of `ServerArgs` that stores the keys from --expert-policy-config."""
ON_DISAGREEMENT = "--expert-policy-on-disagreement"
IGNORES_EXACT = "--expert-policy-ignore-client-exact"


@dataclass(frozen=True)
class Arguments:
    """The parsed flags of the expert-selection stage.

    `schedule` is None if the server only masks padding rows. If `stops` is True, the server ends when its ranks select
    different experts. If `ignores_exact` is True, the policy also applies to requests that ask to be exact.
    """

    schedule: Schedule | None
    trace: Path | None = None
    stops: bool = False
    ignores_exact: bool = False


def read_arguments(server_args: Any, speculates: str = SPECULATES) -> Arguments | None:
    """Parse the flags of the expert-selection stage. Return None if the stage is off.

    `speculates` names the flag that turns speculation on. Error messages quote it. Raises `ExpertPolicyError` if a flag
    is wrong.
    """
    name = getattr(server_args, "expert_policy", None)
    config = getattr(server_args, "expert_policy_config", None)
    trace = getattr(server_args, "expert_policy_trace", None)
    mask_padding = bool(getattr(server_args, "mask_padding_experts", False))
    then = getattr(server_args, "expert_policy_on_disagreement", None)
    if then not in (None, "vanilla", "stop"):
        raise ExpertPolicyError(ON_DISAGREEMENT, then, "must be vanilla or stop")
    if name is None:
        together = "must be used with --expert-policy"
        valued = ("--expert-policy-config", config), ("--expert-policy-trace", trace), (ON_DISAGREEMENT, then)
        for flag, value in valued:
            if value is not None:
                raise ExpertPolicyError(flag, value, together)
        if ignores_exact(server_args):
            raise ExpertPolicyError(IGNORES_EXACT, None, together)
        return Arguments(None) if mask_padding else None
    # Read the keys only once, because SGLang copies `server_args` to other processes. If these processes read the file
    # again, the file might have changed, or it might be a pipe that is already empty.
    if not hasattr(server_args, KEYS):
        setattr(server_args, KEYS, read_config(config))
    keys = getattr(server_args, KEYS)
    speculative = is_speculative(server_args)
    try:
        schedule = build_schedule(*join_keys(name, keys), speculative, speculates, pages_experts(server_args))
    except ValueError as error:
        given = "" if config is None else f" --expert-policy-config {_one_line(config)}"
        raise ExpertPolicyError("--expert-policy", f"{_one_line(name)}{given}", str(error)) from None
    if mask_padding and (schedule is None or schedule.observed):
        short = name.partition(":")[0]
        reason = f"{short} routes as the model does; use another policy"
        raise ExpertPolicyError("--mask-padding-experts", f"with --expert-policy {short}", reason)
    if schedule is None:
        if trace is not None:
            reason = "vanilla selects nothing that could be traced; use another policy"
            raise ExpertPolicyError("--expert-policy-trace", f"{trace} with --expert-policy vanilla", reason)
        return None
    if trace is not None:
        trace = Path(trace)
        try_file("--expert-policy-trace", trace)
        trace = trace.resolve()
    return Arguments(schedule, trace, then == "stop", ignores_exact(server_args))


def is_on(server_args: Any) -> bool:
    """Return whether the flags turn the expert-selection stage on. `read_arguments` must have accepted the flags."""
    name = getattr(server_args, "expert_policy", None)
    if name is None:
        return bool(getattr(server_args, "mask_padding_experts", False))
    return bool(name.partition(":")[0] != "vanilla")


def ignores_exact(server_args: Any) -> bool:
    """Return whether the policy also applies to requests that ask to be exact."""
    return bool(getattr(server_args, "expert_policy_ignore_client_exact", False))


def join_keys(policy: Any, keys: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the name and all keys of a policy such as xshare:k0=1.

    `keys` contains further keys. Raises ValueError if the text of the policy also contains one of these keys.
    """
    if not isinstance(policy, str) or ":" not in policy:
        return policy, keys
    name, spelt = parse_policy(policy)
    for key, value in keys.items():
        if key in spelt:
            both = f"{as_json(spelt[key])} and {as_json(value)}"
            raise ValueError(f"{key} = {both}: must be in only one of the two flags")
    return name, {**spelt, **keys}


def read_config(config: str | dict[str, Any] | None) -> dict[str, Any]:
    """Return the keys of a policy. `config` is a dict (from `Engine`), JSON text, or the path of a JSON file."""
    if config is None or isinstance(config, dict):
        return dict(config or {})
    refuse = partial(ExpertPolicyError, "--expert-policy-config", _one_line(config) or repr(config))
    if not isinstance(config, str):
        raise refuse(f"must be a dict, JSON text or a JSON file (got {type(config).__name__})")
    allowed = "JSON text such as '{\"k0\": 1}' or a JSON file"
    if not config.strip():
        raise refuse(f"must be {allowed}")
    if not config.lstrip().startswith(("{", "[")):
        return read_json("--expert-policy-config", config, allowed)
    try:
        return read_object(config)
    except ValueError as error:
        raise refuse(str(error)) from None


def _one_line(config: Any) -> str:
    return " ".join(str(config).split())
