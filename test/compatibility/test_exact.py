"""Which servers have exact requests, and what a request may say: one line for whatever is refused."""

from types import SimpleNamespace
from typing import Any

import pytest

from refused import refused
from sglang_xshare import hooks
from sglang_xshare.compatibility.exact import TREE_IN_CPP, check_rule
from sglang_xshare.policies.exact import Rule

SERVED = {
    **{"expert_policy": "xshare", "enable_priority_scheduling": False, "speculative_algorithm": "EAGLE3"},
    **{"enable_flexkv": False, "radix_cache_backend": None},
}
BY_PRIORITY = Rule(priority=10)
# What a server has beside the flags of one that is served, and what its configuration or a request says.
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
    "a request that its forward does not name": ({"speculative_algorithm": "UNO"}, "exact"),
    "a default that no forward names": ({"speculative_algorithm": "UNO"}, Rule(default=True)),
    "priorities that are none": ({}, BY_PRIORITY),
    "a default with paged experts": ({"enable_paged_experts": True}, Rule(default=True)),
}


def refuse(case: str, monkeypatch: pytest.MonkeyPatch, *_: Any) -> None:
    given, said = REFUSED[case]
    leave_as_given(monkeypatch)
    server = SimpleNamespace(**SERVED | given)
    if isinstance(said, Rule):
        check_rule(said, server)
    else:
        ask(server, said, given.get("beam_width"))


def ask(server: SimpleNamespace, said: Any, beam_width: int | None = None) -> None:
    check(server, {"expert_policy": said}, beam_width)


def check(server: SimpleNamespace, params: Any, beam_width: int | None = None, routing_key: str | None = None) -> None:
    asked = SimpleNamespace(custom_params=params, beam_width=beam_width)
    hooks.check_request(SimpleNamespace(server_args=server), asked, SimpleNamespace(routing_key=routing_key))


def leave_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments that SGLang need not resolve."""
    monkeypatch.setattr("sglang_xshare.compatibility.exact.resolved", lambda server_args: server_args)


@pytest.mark.parametrize("params", ["exact", ["exact"], 1, {"exact"}], ids=str)
def test_what_is_no_object_asks_for_nothing_silently(params):
    with pytest.raises(ValueError, match="custom_params"):
        check(SimpleNamespace(**SERVED), params)
    check(SimpleNamespace(expert_policy=None), params)


LONG = "x" * 3_000_000
WORDS: list[Any] = [LONG, [LONG], {LONG: 1}]


@pytest.mark.parametrize("params", [LONG, [LONG], *({"expert_policy": word} for word in WORDS)], ids=range(5))
def test_an_error_repeats_no_long_value(params):
    with pytest.raises(ValueError, match="must be") as raised:
        check(SimpleNamespace(**SERVED), params)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("value", ["1", "true", "YES", "y"])
def test_a_tree_of_prefixes_that_knows_no_namespace_is_refused(value, monkeypatch):
    leave_as_given(monkeypatch)
    monkeypatch.setenv(TREE_IN_CPP, value)
    with pytest.raises(ValueError, match=f"{TREE_IN_CPP} {value}: "):
        ask(SimpleNamespace(**SERVED), "exact")
    with refused(f"{TREE_IN_CPP} {value}"):
        check_rule(BY_PRIORITY, SimpleNamespace(**SERVED))
    ask(SimpleNamespace(**SERVED), "shared")
    monkeypatch.setenv(TREE_IN_CPP, "0")
    ask(SimpleNamespace(**SERVED), "exact")


def test_what_is_served(monkeypatch):
    leave_as_given(monkeypatch)
    check_rule(BY_PRIORITY, SimpleNamespace(**SERVED | {"enable_priority_scheduling": True}))
    check_rule(Rule(default=True), SimpleNamespace(**SERVED))
    check_rule(Rule(), SimpleNamespace(enable_paged_experts=True))
    for said in ("exact", "shared", None):
        ask(SimpleNamespace(**SERVED), said)
    ask(SimpleNamespace(**SERVED, enable_lmcache=True), "shared")
    ignoring = SimpleNamespace(**SERVED, enable_lmcache=True, expert_policy_ignore_client_exact=True)
    ask(ignoring, "exact", beam_width=2)
    with pytest.raises(ValueError, match="exakt"):
        ask(ignoring, "exakt")
    ask(SimpleNamespace(expert_policy=None, enable_lmcache=True), "exact")  # every answer of such a server is
    for params in ({"thinking_budget": 3}, None):
        hooks.check_request(SimpleNamespace(), SimpleNamespace(custom_params=params), SimpleNamespace())


ROUTING_KEYS = {
    "user-7;expert_policy=exakt": "'exakt'",
    "expert_policy = Exact; user-7": "'Exact'",
    "user-7;expert_policy": "''",
    f"expert_policy={LONG}": "'x",
}


@pytest.mark.parametrize("routing_key", ROUTING_KEYS, ids=lambda key: key[:30])
@pytest.mark.parametrize("policy", ["xshare", None])
def test_a_misspelt_routing_key_is_refused_in_one_line(routing_key, policy):
    with pytest.raises(ValueError, match="expert_policy of the routing key must be 'exact' or 'shared'") as raised:
        check(SimpleNamespace(expert_policy=policy), None, routing_key=routing_key)
    assert f"(got {ROUTING_KEYS[routing_key]}" in str(raised.value)
    assert len(str(raised.value)) < 400
    check(SimpleNamespace(expert_policy=policy), {"expert_policy": "shared"}, routing_key=routing_key)  # which wins


def test_a_routing_key_is_refused_what_the_parameters_are_refused(monkeypatch):
    leave_as_given(monkeypatch)
    server, key = SimpleNamespace(**SERVED), "user-7;expert_policy=exact"
    with pytest.raises(ValueError, match="of the routing key = 'exact': beam_width must be 1"):
        check(server, None, beam_width=2, routing_key=key)
    with pytest.raises(ValueError, match="of the routing key = 'exact': --enable-lmcache on"):
        check(SimpleNamespace(**SERVED, enable_lmcache=True), None, routing_key=key)
    for routing_key in (key, "expert_policy=shared", "my_expert_policy=1", "expert_policy_2=1", "", None):
        check(server, None, routing_key=routing_key)
