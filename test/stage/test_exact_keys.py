"""Exact requests by what a client sends as keys: for SGLang's cache, and in a header."""

import pytest

from sglang_xshare.policies.exact import Rule
from sglang_xshare.stage.exact import Exact
from stage.test_exact import Req, admit


def test_no_key_of_a_client_reaches_the_prefixes_of_exact_requests():
    """Every pair of requests has the same prefixes only if both send the same and both are exact, or neither."""
    sent = [None, "tenant", "expert_policy=exact", "expert_policy=exact|tenant", "expert_policy=shared|tenant"]
    sent += ["expert_policy=shared|expert_policy=exact", "expert_policy=", "expert_policy=exact|"]
    found = {}
    for said in ("exact", "shared", None):
        for number, extra_key in enumerate(sent):
            req = Req(f"{said} {number}", said)
            req.extra_key = extra_key
            admit(Exact("cpu"), req)
            found.setdefault(req.extra_key, set()).add((said == "exact", extra_key))
            admit(Exact("cpu"), req)  # retracted, it arrives again
            assert req.extra_key in found
    assert len(found) == 2 * len(sent)
    assert all(len(which) == 1 for which in found.values())
    assert found[None] == {(False, None)}


@pytest.mark.parametrize(
    ("routing_key", "said", "is_exact"),
    [
        ("expert_policy=exact", None, True),
        ("user-7;expert_policy=exact", None, True),
        ("expert_policy=exact; user-7", None, True),
        ("user-7;expert_policy=shared", None, False),
        ("user-7; expert_policy = shared ", None, False),
        ("user-7;expert_policy=exakt", None, True),  # which nobody could refuse before
        ("user-7", None, None),
        ("", None, None),
        (None, None, None),
        ("my_expert_policy=exact", None, None),
        ("expert_policy=exact", "shared", False),
        ("expert_policy=shared", "exact", True),
    ],
)
def test_a_routing_key_says_it_where_a_front_end_drops_the_body(routing_key, said, is_exact):
    for default in (False, True):
        exact = Exact("cpu")
        req = Req("a", said)
        req.routing_key = routing_key
        admit(exact, req, rule=Rule(default=default))
        assert bool(req.expert_policy_exact) == (default if is_exact is None else is_exact)
