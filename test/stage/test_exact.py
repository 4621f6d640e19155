"""Exact requests in the stage: which are, in which rows of a step they lie, and what a captured graph reads of them."""

import gc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_xshare import Batch, Router, build_plan, hooks, select
from sglang_xshare.policies import VANILLA
from sglang_xshare.policies.exact import NAMESPACE, Rule
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.stage.exact import ATTACHED, MIXED_SESSION, Exact
from sglang_xshare.stage.gather import Ranks
from sglang_xshare.stage.record.counters import EXACT
from sglang_xshare.stage.step import read_key, read_step
from sglang_xshare.stage.switch import make_next
from stage.fake import TOP_K, XSHARE, forward, forward_batch, gathered_batches, run

NO_RULE = Rule()
SCHEDULER = SimpleNamespace(enable_hicache_storage=False, metrics_reporter=None)


class Req:
    """Upstream's request, as far as the stage asks it."""

    def __init__(self, rid: str, said: str | None = None, priority: int | None = None, session: Any = None) -> None:
        params = None if said is None else {"expert_policy": said, "thinking_budget": 3}
        self.rid, self.priority, self.session = rid, priority, session
        self.sampling_params = SimpleNamespace(custom_params=params)
        self.extra_key: str | None = None
        self.routing_key: str | None = None
        self.customized_info: dict[str, Any] | None = None
        self.aborted: str | None = None
        self.is_finished = False

    def finished(self) -> bool:
        return self.is_finished

    def set_finish_with_abort(self, line: str) -> None:
        self.aborted = line


def batch_of(reqs: list[Req], mode: str = "decode", tokens: int = 1, padding: int = 0) -> SimpleNamespace:
    """The forward batch of these requests, `tokens` rows each, and so many requests of padding."""
    size = len(reqs) + padding
    batch = forward_batch(mode, size * tokens, size, padding=padding * tokens)
    batch.rids = [req.rid for req in reqs]
    return batch


def begin(exact: Exact, batch: SimpleNamespace, ranks: Ranks | None = None) -> None:
    """As the stage does before a forward."""
    key = read_key(batch, ranks)
    assert key is not None
    exact.write(batch.rids, key[2])


def admit(exact: Exact, *reqs: Req, rule: Rule = NO_RULE) -> None:
    for req in reqs:
        exact.admit(req, rule)


def arrive(*reqs: Req) -> Sequence[Req]:
    """Requests, once a scheduler has got them."""
    for req in reqs:
        hooks.admit(SCHEDULER, req)
    return reqs


def test_a_request_says_it_or_the_rule_does():
    reqs = [Req("a", "exact"), Req("b", "shared", 12), Req("c", priority=12), Req("d", priority=9), Req("e")]
    found = {}
    for rule in (Rule(), Rule(priority=10), Rule(default=True), Rule(10, True)):
        exact = Exact("cpu")
        for req in reqs:
            vars(req).pop("expert_policy_exact", None)
        admit(exact, *reqs, rule=rule)
        found[rule.priority, rule.default] = "".join(sorted(exact.requests))
    assert found == {(None, False): "a", (10, False): "ac", (None, True): "acde", (10, True): "acde"}
    low = Exact("cpu", low_first=True)
    urgent, late = Req("f", priority=10), Req("g", priority=11)
    admit(low, urgent, late, rule=Rule(priority=10))
    assert set(low.requests) == {"f"}, "the lower values go first"
    assert reqs[0].sampling_params.custom_params == {"expert_policy": "exact", "thinking_budget": 3}


def test_it_is_decided_once_and_forgotten_with_the_request():
    exact = Exact("cpu")
    req, other = Req("a", "exact"), Req("b")
    admit(exact, req, other)
    admit(exact, req, other, rule=Rule(default=True))  # retracted, while the server's default is another
    assert set(exact.requests) == {"a"}
    assert (req.extra_key, other.extra_key) == (NAMESPACE, None)
    del req
    gc.collect()
    assert not exact.requests
    admit(exact, kept := Req("a", "exact"), again := Req("a"), third := Req("a", "exact"))
    assert dict(exact.requests) == {"a": kept}, "one that is still answered keeps its id"
    assert [req.aborted is None for req in (kept, again, third)] == [True, False, False]
    kept.is_finished = True
    admit(exact, again := Req("a"))
    assert not exact.requests, "an id that is used again is another request's"
    assert kept.expert_policy_exact
    assert not again.expert_policy_exact


def test_a_namespace_is_beside_the_clients_own():
    req = Req("a", "exact")
    req.extra_key = "tenant"
    admit(Exact("cpu"), req)
    assert req.extra_key == f"{NAMESPACE}|tenant"


def test_a_streaming_session_stays_exact_or_is_refused():
    exact = Exact("cpu")
    mixed, pure, plain = (SimpleNamespace(streaming=streaming) for streaming in (True, True, False))
    turns = [Req("a", session=mixed), Req("b", "exact", session=mixed), Req("c", "exact", session=pure)]
    turns += [Req("d", session=plain), Req("e", "exact", session=plain)]
    admit(exact, *turns)
    assert [req.aborted for req in turns] == [None, MIXED_SESSION, None, None, None]


@pytest.mark.parametrize(("refusal", "is_attached", "line"), [("no slots", False, "no slots"), (None, True, ATTACHED)])
def test_a_server_that_can_have_none_answers_why(refusal, is_attached, line):
    """Where no front end has checked, and where a storage is attached later."""
    exact, req, other = Exact("cpu", refusal=refusal), Req("a", "exact"), Req("b")
    for one in (req, other):
        exact.admit(one, NO_RULE, is_attached)
    assert (req.aborted, other.aborted) == (line, None)


def test_every_row_of_an_exact_request_is_marked():
    exact = Exact("cpu")
    reqs = [Req(str(number), "exact" if number in (1, 3) else None) for number in range(5)]
    admit(exact, *reqs)
    for tokens, mode in ((1, "decode"), (3, "verify")):
        batch = batch_of(reqs, mode, tokens)
        begin(exact, batch)
        step = read_step(batch, mask_padding=False, exact=exact)
        assert step.batch.exact.view(5, tokens).all(1).tolist() == [False, True, False, True, False]
        assert int(step.batch.exact.sum()) == 2 * tokens
    others = batch_of([reqs[0], reqs[2]])
    begin(exact, others)
    assert read_step(others, mask_padding=False, exact=exact).batch.exact is None, "no row of the step is exact"


def test_beams_are_not_exact():
    exact, req = Exact("cpu"), Req("a")
    req.beam_group = object()
    admit(exact, req, rule=Rule(default=True))
    assert not exact.requests


def test_without_an_exact_request_nothing_is_looked_at():
    exact = Exact("cpu")
    admit(exact, Req("a"), Req("b", "shared"))
    assert not exact.is_used
    assert exact.find(4) is None


def test_a_graphs_flags_are_written_where_they_lie_and_only_when_they_change(monkeypatch):
    """The device's, here by a stand-in: what a graph has captured is a view, and the host writes before a replay."""
    exact = Exact("cpu")
    monkeypatch.setattr(Exact, "find", Exact.read)  # as on a GPU
    captured = read_step(forward_batch("decode", 8, padding=8), True, exact=exact).batch.exact
    assert not captured.any()
    writes = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda own, *args, **keys: writes.append(1) or copy(own, *args, **keys))
    reqs = [Req(str(number), "exact" if number == 2 else None) for number in range(6)]
    admit(exact, *reqs)
    for running in (reqs, reqs, reqs[:4], reqs[1:], [*reqs[3:], reqs[2]], reqs[3:], reqs[4:]):
        begin(exact, batch_of(running))  # which the graph's runner pads
        live = torch.arange(8) < len(running)
        assert (captured & live).tolist() == [req.rid == "2" for req in running] + [False] * (8 - len(running))
    assert len(writes) == 4, "1: row 2; the same twice; 2: row 1; 3: row 3; 4: none; the same"


def test_ranks_tell_each_other(monkeypatch):
    """Data-parallel attention: an exact row of one rank is one of the step on all, padding never is."""
    ranks = [Exact("cpu"), Exact("cpu")]
    reqs = [[Req("a"), Req("b", "exact"), Req("c")], [Req("d", "exact")]]
    batches = gathered_batches("decode", [3, 1])
    told = []
    monkeypatch.setattr("sglang_xshare.stage.step.gather_rows", lambda own, rows, batch: told.append(own) or own)
    for exact, running, batch in zip(ranks, reqs, batches, strict=True):
        admit(exact, *running)
        exact._flags[3:] = True  # whatever lies beyond the requests
        batch.rids = [req.rid for req in running]
        begin(exact, batch)
        read_step(batch, mask_padding=False, exact=exact)
    gathered = torch.cat(told)
    assert gathered.tolist() == [1, 2, 1, 2, 0, 0]
    monkeypatch.setattr("sglang_xshare.stage.step.gather_rows", lambda own, rows, batch: gathered)
    step = read_step(batches[0], mask_padding=False, exact=ranks[0])
    assert step.batch.valid.tolist() == [True, True, True, True, False, False]
    assert step.batch.exact.tolist() == [False, True, False, True, False, False]


def test_ranks_that_route_rows_of_their_own(monkeypatch):
    exact, alone = Exact("cpu"), Ranks(rank=1, size=2, share=2, num_experts=8, together=False)
    batch = gathered_batches("decode", [4, 4])[0]
    reqs = [Req(str(number), "exact" if number == 2 else None) for number in range(4)]
    admit(exact, *reqs)
    batch.rids = [req.rid for req in reqs]
    begin(exact, batch, alone)
    step = read_step(batch, False, alone, exact)
    assert step.batch.exact.tolist() == [True, False], "the second half of its attention rank's rows"


@pytest.fixture
def served(build):
    """(model, stage) under policy."""
    return build(2, **XSHARE)


def test_the_stage_reads_no_request_without_an_exact_one(served):
    _, stage = served
    arrive(Req("a"))
    stage.begin_forward(forward_batch("decode", 1))  # which has no `rids`
    arrive(kept := Req("b", "exact"))
    stage.begin_forward(forward_batch("prefill", 7))  # no step
    idle = batch_of([kept])
    idle.rids = None
    stage.begin_forward(idle)  # a rank without requests, in a step of the others
    assert stage.exact.find(1) is None
    stage.begin_forward(batch_of([kept, kept]))
    assert stage.exact.find(2).all()
    del kept
    gc.collect()
    stage.begin_forward(batch_of([Req("c")]))
    assert stage.exact.find(1) is None


def test_a_step_is_vanilla_for_exact_rows_and_counts_them(served):
    model, stage = served
    reqs = arrive(*(Req(str(number), "exact" if number % 4 == 0 else None) for number in range(8)))
    forward(model, batch_of(reqs))
    marked = torch.tensor([bool(req.expert_policy_exact) for req in reqs])
    vanilla = select(model.logits, VANILLA, Router(TOP_K))
    wanted = select(model.logits, build_plan("xshare", k0=1, add=2), Router(TOP_K), Batch(exact=marked))
    weights, ids = model.routed[0]
    assert torch.equal(ids[marked], vanilla.topk_ids[marked])
    assert torch.equal(weights[marked], vanilla.topk_weights[marked])
    assert not torch.equal(ids[~marked], vanilla.topk_ids[~marked])
    assert stage.acting.counters.totals[:, EXACT].tolist() == [2, 2]
    found, _ = stage.acting.since_switch.look()
    assert found.exact_rows == 4
    others = wanted.kept_mass[~marked].double().mean()
    assert found.others_kept_mass == pytest.approx(float(others), rel=1e-6)
    forward(model, batch_of(reqs[1:4]))
    assert stage.acting.counters.totals[:, EXACT].tolist() == [2, 2]


def test_the_rule_of_the_last_policy_holds_while_the_model_is_vanilla(served):
    """Else who arrives in between would be under the policy once it is back."""
    _, stage = served
    policy = {"k0": 1, "add": 2}
    for keys, is_exact in ((policy | {"exact": {"default": True}}, True), (None, True), (policy, False)):
        stage.in_force = make_next(stage, keys and build_schedule("xshare", keys, speculative=False))
        [req] = arrive(Req(str(keys)))
        assert bool(req.expert_policy_exact) == is_exact, keys


@pytest.mark.parametrize("low_first", [False, True])
def test_priorities_have_the_servers_order(low_first, build):
    _, stage = build(1, **XSHARE, schedule_low_priority_values_first=low_first)
    stage.exact.admit(req := Req("a", priority=3), Rule(priority=10))
    assert bool(req.expert_policy_exact) == low_first


def test_no_row_is_exact_where_the_server_refuses(build, monkeypatch):
    """Also where a graph would read the flags."""
    model, stage = build(1, device="meta", **XSHARE)
    for exact, reads in ((Exact("cpu", refusal="no slots"), False), (Exact("cpu"), True)):
        exact._written = [0]
        stage.exact = exact
        steps = []
        monkeypatch.setattr(stage, "_finish", lambda step, *args, steps=steps: steps.append(step))
        run(model, "decode", 4, alone=True)
        assert (steps[0].batch.exact is not None) == reads
