"""Requests that ask to be exact of a server whose operator ignores what clients ask."""

from types import SimpleNamespace

import torch

from sglang_xshare import Batch, Router, build_plan, hooks, select
from sglang_xshare.policies.exact import NAMESPACE, Rule
from sglang_xshare.stage.exact import Exact
from sglang_xshare.stage.record.metadata import Forward
from stage.fake import EXPERTS, TOP_K, XSHARE, Model, runner
from stage.test_exact import SCHEDULER, Req, batch_of


def test_a_client_that_is_ignored_follows_the_policy_and_its_answer_says_so(attach):
    """The operator's own rule still decides, and a client may still ask to share."""
    attach(model := Model(2))
    rule = {"expert_policy_config": {"k0": 1, "add": 2, "exact": {"priority": 10}}}
    model_runner = runner(model, **XSHARE | rule, expert_policy_ignore_client_exact=True)
    hooks.attach(model_runner)
    keyed, beam = Req("keyed"), Req("beam", "exact")
    keyed.routing_key, beam.beam_group = "user-7;expert_policy=exact", object()
    reqs = [Req("asks", "exact"), Req("shares", "shared", 12), Req("silent"), Req("high", "exact", 12), keyed, beam]
    reqs.append(Req("by rule", priority=10))
    for req in reqs:
        hooks.admit(SCHEDULER, req)
    model.logits = torch.randn(len(reqs), EXPERTS, generator=torch.Generator().manual_seed(0))
    model_runner.forward(batch_of(reqs))
    for req in reqs:
        hooks.count(req, SimpleNamespace(expert_policy=Forward("a", is_step=True, acts=True)))
    told = {req.rid: req.customized_info["expert_policy"][0:1][0] for req in reqs}
    assert {rid: (answer.get("exact"), answer["steps"]) for rid, answer in told.items()} == {
        "asks": (False, 1),
        "shares": (None, 1),
        "silent": (None, 1),
        "high": (True, 0),
        "keyed": (False, 1),
        "beam": (False, 1),
        "by rule": (True, 0),
    }
    assert ["exact" in told[rid] for rid in ("shares", "silent")] == [False, False]
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
