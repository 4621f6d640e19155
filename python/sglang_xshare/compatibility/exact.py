"""Checks for exact requests: whether the server can serve them, and whether each request is valid.

An exact request is routed as the model routes, without the policy.
"""

import os
from typing import Any

from ..policies.exact import EXACT, KEY, SHARED, Rule, check_said, read_routing_key
from ..policies.keys import as_json
from ..refusal import ExpertPolicyError, list_others, spell_flag, spell_value
from ..upstream.server import drafter, resolved
from .arguments import ignores_exact, is_on

SHARED_PREFIXES = "the cache may return what requests under policy have stored"
# Arguments that exclude exact requests, each with the reason.
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
"""A drafter that builds its own forward batches. These batches do not contain the ids of their requests (`rids`)."""
TREE_IN_CPP = "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"
"""SGLang's environment variable, before 0.5.21, for a prefix cache that does not support `extra_key`.

`extra_key` separates the cache entries of exact requests from the entries of other requests.
"""


def find_refusal(config: Any, source: str = f"custom_params.{KEY}") -> str | None:
    """Return the reason why the server cannot serve exact requests, in one line. Return None if it can serve them.

    `source` names the field of the request in which the client asks to be exact.
    """
    if (found := _find_obstacle(config)) is None:
        return None
    flag, value, reason, _ = found
    return f"{source} = {EXACT!r}: {flag} {value}: {reason}; must be {SHARED!r}"


def _find_obstacle(config: Any) -> tuple[str, str, str, str] | None:
    """Find a flag or environment variable that excludes exact requests. Return None if there is none.

    The result contains its name, its value, the reason, and the value that is allowed.
    """
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
    """Raise `ExpertPolicyError` if the server does not support the policy's key `exact`."""
    if rule == Rule():
        return
    if found := _find_obstacle(config):
        flag, value, reason, allowed = found
        raise ExpertPolicyError(flag, value, f"{reason}; must be {allowed}")
    if rule.priority is not None and not getattr(config, "enable_priority_scheduling", False):
        reason = "requests have a priority only with --enable-priority-scheduling; add that flag"
        raise ExpertPolicyError("--expert-policy-config", f'exact {{"priority": {rule.priority}}}', reason)


def check_request(sampling_params: Any, routing_key: str | None, server_args: Any) -> None:
    """Raise ValueError, with a message of one line, if the server cannot serve a request.

    The function reads the request's `custom_params`. If they do not contain the setting, it reads the routing key.
    """
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
