"""Which servers have exact requests, and what a request may say: one line for whatever is refused."""

from types import SimpleNamespace
from typing import Any

import pytest

from refused import refused
from sglang_xshare import hooks
from sglang_xshare.compatibility.exact import TREE_IN_CPP, check_rule
from sglang_xshare.policies.exact import Rule

SERVED = {"expert_policy": "xshare", "enable_priority_scheduling": False}
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
    params = SimpleNamespace(custom_params={"expert_policy": said}, beam_width=beam_width)
    hooks.check_request(SimpleNamespace(server_args=server), params)


def leave_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments that SGLang need not resolve."""
    monkeypatch.setattr("sglang_xshare.compatibility.exact.resolved", lambda server_args: server_args)


@pytest.mark.parametrize("params", ["exact", ["exact"], 1, {"exact"}], ids=str)
def test_what_is_no_object_asks_for_nothing_silently(params):
    asked = SimpleNamespace(custom_params=params)
    with pytest.raises(ValueError, match="custom_params"):
        hooks.check_request(SimpleNamespace(server_args=SimpleNamespace(**SERVED)), asked)
    hooks.check_request(SimpleNamespace(server_args=SimpleNamespace(expert_policy=None)), asked)


@pytest.mark.parametrize(
    "said", ["x" * 3_000_000, ["x" * 3_000_000], {"x" * 3_000_000: 1}], ids=["text", "list", "key"]
)
def test_an_error_repeats_no_long_value(said):
    server = SimpleNamespace(**SERVED)
    for params in ({"expert_policy": said}, said):
        if params is said and isinstance(said, dict):
            continue  # an object without our key
        asked = SimpleNamespace(custom_params=params)
        with pytest.raises(ValueError, match="allowed is") as raised:
            hooks.check_request(SimpleNamespace(server_args=server), asked)
        assert len(str(raised.value)) < 400


@pytest.mark.parametrize("value", ["1", "true", "YES"])
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
    check_rule(Rule(), SimpleNamespace(enable_paged_experts=True))
    for said in ("exact", "shared", None):
        ask(SimpleNamespace(**SERVED), said)
    ask(SimpleNamespace(**SERVED, enable_lmcache=True), "shared")
    ignoring = SimpleNamespace(**SERVED, enable_lmcache=True, expert_policy_ignore_client_exact=True)
    ask(ignoring, "exact", beam_width=2)
    with pytest.raises(ValueError, match="exakt"):
        ask(ignoring, "exakt")
    ask(SimpleNamespace(expert_policy=None, enable_lmcache=True), "exact")  # every answer of such a server is
    hooks.check_request(SimpleNamespace(), SimpleNamespace(custom_params={"thinking_budget": 3}))
    hooks.check_request(SimpleNamespace(), SimpleNamespace(custom_params=None))
