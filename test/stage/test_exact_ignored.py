"""Requests that ask to be exact of a server whose operator ignores what clients ask."""

from types import SimpleNamespace

import torch

from sglang_xshare import Batch, Router, build_plan, hooks, select
from sglang_xshare.policies.exact import NAMESPACE, Rule
from sglang_xshare.stage.exact import Exact
from sglang_xshare.stage.record.metadata import Forward
from stage.fake import TOP_K, flags, forward
from stage.test_exact import Req, arrive, batch_of


def test_a_client_that_is_ignored_follows_the_policy_and_its_answer_says_so(build):
    """The operator's own rule still decides, and a client may still ask to share."""
    ruled = flags("xshare", k0=1, add=2, exact={"priority": 10})
    model, _ = build(2, **ruled, expert_policy_ignore_client_exact=True)
    keyed, beam = Req("keyed"), Req("beam", "exact")
    keyed.routing_key, beam.beam_group = "user-7;expert_policy=exact", object()
    reqs = [Req("asks", "exact"), Req("shares", "shared", 12), Req("silent"), Req("high", "exact", 12), keyed, beam]
    reqs = arrive(*reqs, Req("by rule", priority=10))
    forward(model, batch_of(reqs))
    for req in reqs:
        hooks.count(req, SimpleNamespace(expert_policy=Forward("a", is_step=True, acts=True)))
    told = {req.rid: req.customized_info["expert_policy"][0:1][0] for req in reqs}
    not_exact, exact, silent = {"steps": 1, "exact": False}, {"steps": 0, "exact": True}, {"steps": 1}
    wanted = {"asks": not_exact, "shares": silent, "silent": silent, "high": exact, "keyed": not_exact}
    wanted |= {"beam": not_exact, "by rule": exact}
    assert told == {rid: {"policy": "a", "of": 1} | answer for rid, answer in wanted.items()}
    marked = torch.tensor([req.rid in ("high", "by rule") for req in reqs])
    wanted = select(model.logits, build_plan("xshare", k0=1, add=2), Router(TOP_K), Batch(exact=marked))
    assert torch.equal(model.routed[0][1], wanted.topk_ids)
    assert [req.extra_key for req in reqs] == [NAMESPACE if exact else None for exact in marked.tolist()]
    assert not any(req.aborted for req in reqs)


def test_a_client_that_is_ignored_is_not_refused():
    """A server without exact requests, a storage of prefixes, and a session of other turns refuse what is exact."""
    session = SimpleNamespace(streaming=True, expert_policy_mixed=True)
    exact, req = Exact("cpu", refusal="no slots", ignores_asked=True), Req("a", "exact", session=session)
    exact.admit(req, Rule(), is_attached=True)
    assert (req.aborted, req.expert_policy_exact, req.extra_key) == (None, False, None)
    assert not exact.is_used
