"""Checks of exact requests: of the server that serves them, and of each request."""

import os
from typing import Any

from ..policies.exact import EXACT, KEY, SHARED, Rule, check_said, read_routing_key
from ..policies.keys import as_json
from ..refusal import ExpertPolicyError, list_others, spell_flag, spell_value
from ..upstream.server import drafter, resolved
from .arguments import ignores_exact, is_on

SHARED_PREFIXES = "the cache may return what requests under policy have stored"
# The reason why a request would not be exact, by flag.
REFUSED_FLAGS = {
    "hicache_storage_backend": SHARED_PREFIXES,
    "disaggregation_decode_enable_offload_kvcache": SHARED_PREFIXES,
    "enable_unified_cache_external_linker": SHARED_PREFIXES,
    "enable_lmcache": SHARED_PREFIXES,
    "enable_flexkv": SHARED_PREFIXES,
    "radix_cache_backend": SHARED_PREFIXES,
    "enable_paged_experts": "a layer may hold fewer experts than exact requests need",
}

UNNAMED = "UNO"
"""A drafter that makes its own forward batches, which lack the ids of their requests (`rids`)."""
TREE_IN_CPP = "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"
"""Upstream's switch, before 0.5.21, for a prefix cache without `extra_key`, which separates exact requests."""


def find_refusal(config: Any, source: str = f"custom_params.{KEY}") -> str | None:
    """Return in one line why a server serves no exact requests, None if it does; `source` names the request's field."""
    if (found := _find_obstacle(config)) is None:
        return None
    flag, value, reason, _ = found
    return f"{source} = {EXACT!r}: {flag} {value}: {reason}; must be {SHARED!r}"


def _find_obstacle(config: Any) -> tuple[str, str, str, str] | None:
    """Return (a flag or switch that excludes exact requests, its value, why, what is allowed), or None."""
    reason = "no exact requests are possible, because {}"
    switch = os.environ.get(TREE_IN_CPP, "")
    if switch.lower() in ("1", "true", "yes", "y"):
        return TREE_IN_CPP, switch, reason.format(SHARED_PREFIXES), "unset"
    for name, value, _ in list_others(config, dict.fromkeys(REFUSED_FLAGS)):
        if value is not False:
            return spell_flag(name), spell_value(value), reason.format(REFUSED_FLAGS[name]), "off"
    if drafter(config) == UNNAMED:
        return (
            "--speculative-algorithm",
            UNNAMED,
            reason.format("UNO's forwards do not name their requests"),
            "another algorithm",
        )
    return None


def check_rule(rule: Rule, config: Any) -> None:
    """Raise `ExpertPolicyError` for a policy's key `exact` that does not fit the server."""
    if rule == Rule():
        return
    if found := _find_obstacle(config):
        flag, value, reason, allowed = found
        raise ExpertPolicyError(flag, value, f"{reason}; must be {allowed}")
    if rule.priority is not None and not getattr(config, "enable_priority_scheduling", False):
        reason = "requests have a priority only with --enable-priority-scheduling; add that flag"
        raise ExpertPolicyError("--expert-policy-config", f'exact {{"priority": {rule.priority}}}', reason)


def check_request(sampling_params: Any, routing_key: str | None, server_args: Any) -> None:
    """Raise ValueError, one line, for a request whose `custom_params`, or else routing key, cannot be served."""
    params, source = sampling_params.custom_params, f"custom_params.{KEY}"
    if params is not None and not isinstance(params, dict):
        if is_on(server_args):
            raise ValueError(f'custom_params = {as_json(params)}: must be an object such as {{"{KEY}": "{EXACT}"}}')
        params = None
    said = (params or {}).get(KEY)
    if said is None:
        said, source = read_routing_key(routing_key), f"{KEY} of the routing key"
    check_said(said, source)
    if said != EXACT or not is_on(server_args) or ignores_exact(server_args):
        return
    beams = getattr(sampling_params, "beam_width", None) or 1
    if beams > 1:
        raise ValueError(f"{source} = {EXACT!r}: beam_width must be 1 (got {beams})")
    refusal = find_refusal(resolved(server_args), source)
    if refusal is not None:
        raise ValueError(refusal)
