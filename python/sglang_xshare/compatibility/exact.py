"""Checks for exact requests. An exact request is routed without the policy.

The checks decide whether the server can serve exact requests, and whether a request is valid.
"""

import os
from typing import Any

from ..policies.exact import EXACT, KEY, SHARED, Rule, check_said, read_routing_key
from ..policies.keys import as_json
from ..refusal import ExpertPolicyError, list_others, spell_flag, spell_value
from ..upstream.server import drafter, resolved
from .arguments import ignores_exact, is_on

SHARED_PREFIXES = "the cache may return what requests under policy have stored"
# Server arguments with which no exact requests are possible, each with the reason.
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
"""The environment variable that turns on a prefix cache without support for `extra_key`, before SGLang 0.5.21.

`extra_key` separates the cache entries of exact requests from the entries of other requests.
"""


def find_refusal(config: Any, source: str = f"custom_params.{KEY}") -> str | None:
    """Return the reason why the server cannot serve exact requests, or None if it can serve them.

    The reason is one line. `source` is the request's field that asks for exact answers.
    """
    if (found := _find_obstacle(config)) is None:
        return None
    flag, value, reason, _ = found
    return f"{source} = {EXACT!r}: {flag} {value}: {reason}; must be {SHARED!r}"


def _find_obstacle(config: Any) -> tuple[str, str, str, str] | None:
    """Return a flag or environment variable with which no exact requests are possible.

    The result contains the name and the value of the flag or variable, the reason, and the allowed value. Return None
    if there is no such flag or variable.
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
    """Raise `ExpertPolicyError` if the server does not support the value of the policy's key `exact`."""
    if rule == Rule():
        return
    if found := _find_obstacle(config):
        flag, value, reason, allowed = found
        raise ExpertPolicyError(flag, value, f"{reason}; must be {allowed}")
    if rule.priority is not None and not getattr(config, "enable_priority_scheduling", False):
        reason = "requests have a priority only with --enable-priority-scheduling; add that flag"
        raise ExpertPolicyError("--expert-policy-config", f'exact {{"priority": {rule.priority}}}', reason)


def check_request(sampling_params: Any, routing_key: str | None, server_args: Any) -> None:
    """Raise ValueError if a request's choice to be exact is wrong, or if the server cannot serve it.

    The choice is in the request's `custom_params`, or else in its routing key. The error's message is one line.
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
