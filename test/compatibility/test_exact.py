"""Which servers have exact requests, and what a request may say: one line for whatever is refused."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_xshare import hooks
from sglang_xshare.compatibility.exact import TREE_IN_CPP, check_rule
from sglang_xshare.policies.exact import Rule

SERVED = {
    **{"expert_policy": "xshare", "enable_priority_scheduling": False, "speculative_algorithm": "EAGLE3"},
    **{"enable_flexkv": False, "radix_cache_backend": None},
}
BY_PRIORITY = Rule(priority=10)
LONG = "x" * 3_000_000
ROUTING, MISSPELT = "user-7;expert_policy=exact", {"routing_key": "user-7;expert_policy=exakt"}
# What a server and a request have beside those that are served; the policy's rule, or what the request says.
REFUSED: dict[str, tuple[dict[str, Any], Any]] = {
    "a request's unknown word": ({}, "exakt"),
    "a beam": ({"beam_width": 2}, "exact"),
    "a request's list": ({}, ["exact"]),
    **{
        f"a request with {flag}": ({flag: value}, "exact")
        for flag, value in (
            ("hicache_storage_backend", "file"),
            ("enable_lmcache", True),
            ("enable_flexkv", True),
            ("disaggregation_decode_enable_offload_kvcache", True),
            ("enable_unified_cache_external_linker", True),
            ("radix_cache_backend", "own"),
            ("enable_paged_experts", True),
        )
    },
    **{f"a request with {TREE_IN_CPP} {value}": ({TREE_IN_CPP: value}, "exact") for value in ("1", "true", "YES", "y")},
    "a request that its forward does not name": ({"speculative_algorithm": "UNO"}, "exact"),
    "a default that no forward names": ({"speculative_algorithm": "UNO"}, Rule(default=True)),
    "priorities that are none": ({}, BY_PRIORITY),
    "priorities with a tree of prefixes that knows no namespace": ({TREE_IN_CPP: "1"}, BY_PRIORITY),
    "a default with paged experts": ({"enable_paged_experts": True}, Rule(default=True)),
    "parameters that are text": ({"custom_params": "exact"}, None),
    "parameters that are a list": ({"custom_params": ["exact"]}, None),
    "parameters that are a number": ({"custom_params": 1}, None),
    "parameters that are a set": ({"custom_params": {"exact"}}, None),
    "parameters that are long text": ({"custom_params": LONG}, None),
    "parameters that are a list of long text": ({"custom_params": [LONG]}, None),
    "a long word": ({}, LONG),
    "a list of a long word": ({}, [LONG]),
    "an object of a long word": ({}, {LONG: 1}),
    "a routing key's unknown word": (MISSPELT, None),
    "a routing key's unknown word without a policy": ({**MISSPELT, "expert_policy": None}, None),
    "a routing key in capitals": ({"routing_key": "expert_policy = Exact; user-7"}, None),
    "a routing key without a word": ({"routing_key": "user-7;expert_policy"}, None),
    "a routing key's long word": ({"routing_key": f"expert_policy={LONG}"}, None),
    "a routing key with a beam": ({"routing_key": ROUTING, "beam_width": 2}, None),
    "a routing key with enable_lmcache": ({"routing_key": ROUTING, "enable_lmcache": True}, None),
    "an ignored client's unknown word": ({"expert_policy_ignore_client_exact": True}, "exakt"),
}


def refuse(case: str, monkeypatch: pytest.MonkeyPatch, *_: Any) -> None:
    given, said = REFUSED[case]
    leave_as_given(monkeypatch)
    if TREE_IN_CPP in given:
        monkeypatch.setenv(TREE_IN_CPP, given[TREE_IN_CPP])
    if isinstance(said, Rule):
        check_rule(said, SimpleNamespace(**SERVED | given))
    else:
        ask(said, **given)


def ask(said: Any, **given: Any) -> None:
    """Check a request that says `said`. `given` replaces fields of a request and a server that are served."""
    params = given.get("custom_params", {"expert_policy": said})
    asked = SimpleNamespace(custom_params=params, beam_width=given.get("beam_width"))
    routed = SimpleNamespace(routing_key=given.get("routing_key"))
    hooks.check_request(SimpleNamespace(server_args=SimpleNamespace(**SERVED | given)), asked, routed)


def leave_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments that SGLang need not resolve."""
    monkeypatch.setattr("sglang_xshare.compatibility.exact.resolved", lambda server_args: server_args)


def test_what_is_served(monkeypatch):
    leave_as_given(monkeypatch)
    check_rule(BY_PRIORITY, SimpleNamespace(**SERVED | {"enable_priority_scheduling": True}))
    check_rule(Rule(default=True), SimpleNamespace(**SERVED))
    check_rule(Rule(), SimpleNamespace(enable_paged_experts=True))
    for said in ("exact", "shared", None):
        ask(said)
    ask("shared", enable_lmcache=True)
    ask("exact", enable_lmcache=True, expert_policy_ignore_client_exact=True, beam_width=2)
    ask("exact", expert_policy=None, enable_lmcache=True)  # every answer of such a server is
    for params in ("exact", ["exact"], 1, {"exact"}):
        ask(None, expert_policy=None, custom_params=params)
    for params in ({"thinking_budget": 3}, None):
        hooks.check_request(SimpleNamespace(), SimpleNamespace(custom_params=params), SimpleNamespace())
    for routing_key in (ROUTING, "expert_policy=shared", "my_expert_policy=1", "expert_policy_2=1", "", None):
        ask(None, routing_key=routing_key)
    for policy in ("xshare", None):
        ask("shared", expert_policy=policy, **MISSPELT)  # the parameters win
    monkeypatch.setenv(TREE_IN_CPP, "1")
    ask("shared")
    monkeypatch.setenv(TREE_IN_CPP, "0")
    ask("exact")
