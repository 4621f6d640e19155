"""What a server must have for exact requests, and what a request may ask for."""

from __future__ import annotations

from typing import Any

from ..exact import EXACT, KEY, Rule, check_said
from ..refusal import ExpertPolicyError, refusal
from ..stage.upstream.server import resolved
from .arguments import is_on

# Where a request that is asked to be exact would not be: by flag, why.
REFUSED_FLAGS = {
    "hicache_storage_backend": "prefixes there are shared with requests that are not exact",
    "enable_lmcache": "prefixes there are shared with requests that are not exact",
    "enable_flexkv": "prefixes there are shared with requests that are not exact",
    "enable_paged_experts": "a step has no slots for all experts that exact requests may need",
}


def check_exact(config: Any) -> None:
    """Raise `ExpertPolicyError` where a server cannot have exact requests; `config` is resolved or as it was given."""
    for flag, reason in REFUSED_FLAGS.items():
        value = getattr(config, flag, None)
        if value not in (None, False):
            shown = "on" if value is True else value
            raise refusal(f"--{flag.replace('_', '-')}", shown, f"{reason}; allowed with exact requests is off")


def check_rule(rule: Rule, config: Any) -> None:
    """Raise `ExpertPolicyError` for a policy's key `exact` that the server does not fit."""
    if rule == Rule():
        return
    check_exact(config)
    if rule.priority is not None and not getattr(config, "enable_priority_scheduling", False):
        reason = "SGLang gives requests a priority with --enable-priority-scheduling alone; allowed is that flag beside it"
        raise ExpertPolicyError("--expert-policy-config", f'exact {{"priority": {rule.priority}}}', reason)


def check_request(said: Any, sampling_params: Any, server_args: Any) -> None:
    """Raise ValueError in one line where a request asks, by its `custom_params`, for what it cannot get."""
    check_said(said)
    if said != EXACT or not is_on(server_args):
        return
    if (getattr(sampling_params, "beam_width", None) or 1) > 1:
        raise ValueError(f"custom_params.{KEY} = {EXACT!r}: a beam's other rows are no requests; allowed is beam_width 1")
    try:
        check_exact(resolved(server_args))
    except ExpertPolicyError as error:
        raise ValueError(f"custom_params.{KEY} = {EXACT!r}: {error}") from None
