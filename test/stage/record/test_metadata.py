"""Response metadata: each forward counts as what it was, on the host, also where a graph replays."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_xshare import hooks
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.stage.in_force import LONGEST, InForce
from sglang_xshare.stage.record.figures import hash_plan
from sglang_xshare.stage.record.metadata import KEY, Forward
from sglang_xshare.stage.step import StepKey, read_key
from sglang_xshare.upstream.batches import Batches
from stage.fake import XSHARE, flags, forward, forward_batch, gathered_batches, make_reporter, replay
from stage.switching import Capturing, switch

SPELT = "xshare:k0=1,add=2"
REPORTER = make_reporter(current_scheduler_metrics_enabled=False)


@pytest.fixture
def launch(build):
    """Call it with flags for a function that launches a forward and returns what its requests count."""

    def start(batches: Batches | None = None, **flags: Any) -> Any:
        model, _ = build(3, batches, **flags)
        return lambda batch: getattr(replay(batch, partial(forward, model, batch, alone=True)), KEY, None)

    return start


@pytest.mark.parametrize(
    ("mode", "rows", "requests", "is_step", "acts"),
    [
        ("prefill", 9, 2, False, False),
        ("decode", 1, 1, True, False),
        ("decode", 4, 4, True, True),
        ("verify", 8, 2, True, True),
        ("idle", 0, 1, False, False),
    ],
)
def test_an_eager_forward_is_what_the_stage_made_of_it(launch, mode, rows, requests, is_step, acts):
    assert launch(**XSHARE)(forward_batch(mode, rows, requests)) == Forward(SPELT, is_step, acts)


@pytest.mark.parametrize(
    ("asked", "told"),
    [({"expert_policy": "observe"}, Forward("observe", True, False)), ({"mask_padding_experts": True}, None)],
    ids=["observe", "mask"],
)
def test_what_selects_nothing_never_acts(launch, asked, told):
    assert launch(**asked)(forward_batch("decode", 4, padding=1)) == told


def test_a_mask_of_padding_is_no_policy_after_a_switch_to_vanilla(launch):
    """Its layers select, so that padding has no expert of its own."""
    step = launch(Batches(always_pad=True), mask_padding_experts=True)
    switch(hooks._stage, build_schedule("oea", {"k0": 2}, speculative=False), REPORTER)
    assert step(forward_batch("decode", 4, padding=1)) == Forward("oea:k0=2", True, True)
    switch(hooks._stage, None, REPORTER)
    assert step(forward_batch("decode", 4, padding=1)) == Forward("vanilla", True, False)


@pytest.fixture
def replays(build, monkeypatch):
    """Call it with a forward batch for a replay's count: selection from 3 rows on, graphs of 1, 2 and 4 rows."""
    model, stage = build(3, Batches(captured=(1, 2, 4)), **flags("xshare", k0=1, add=2, min_rows=3))
    capturing = Capturing(monkeypatch, model, stage)
    for rows in (4, 2, 1):
        capturing.capture(rows)
    return lambda batch: getattr(replay(batch), KEY)


@pytest.mark.parametrize(("rows", "acts"), [(1, False), (2, False), (3, True), (4, True)])
def test_a_replay_counts_by_its_captured_size(replays, rows, acts):
    assert replays(forward_batch("decode", rows)) == Forward("xshare:k0=1,add=2,min_rows=3", True, acts)


def test_a_replay_takes_the_plan_of_the_size_it_pads_to(replays):
    """Two requests fit no graph but that of four, whose plan selects."""
    del hooks._stage.graphs.captured[StepKey("decode", 2)]
    assert replays(forward_batch("decode", 2)).acts


def test_the_device_is_not_waited_for(replays):
    """The slots that tell padding lie on the device, and are not looked at."""
    batch = forward_batch("decode", 4)
    batch.out_cache_loc = None
    assert replays(batch).acts


@pytest.mark.parametrize(("mode", "draft_tokens"), [("decode", None), ("verify", 4)])
def test_ranks_of_data_parallel_attention_tell_the_rows_of_all(mode, draft_tokens):
    """A graph pads every rank to the longest."""
    for batch in gathered_batches(mode, [3, 1, 0], draft_tokens, longest=False):
        assert read_key(batch) == (mode, 9 * (draft_tokens or 1), draft_tokens or 1)
    for batch in gathered_batches(mode, [3, 0], draft_tokens, others="prefill"):
        assert read_key(batch) is None


def count(*forwards: Forward, **of_request: bool | None) -> dict[str, Any] | None:
    """The metadata of a request that had these forwards."""
    request = SimpleNamespace(customized_info=None, **of_request)
    for counted in forwards:
        hooks.count(request, SimpleNamespace(**{KEY: counted}))
    (metadata,) = request.customized_info[KEY][7:8]
    return metadata


ACTED, NOT = Forward("a", True, True), Forward("a", True, False)
PREFILL = Forward("a", False, False)


@pytest.mark.parametrize(
    ("forwards", "policy", "steps", "of"),
    [
        ([PREFILL], "a", 0, 0),
        ([PREFILL, ACTED, NOT, ACTED], "a", 2, 3),
        ([PREFILL._replace(policy="b"), ACTED], "a", 1, 1),  # the policy was switched before anything was decoded
        ([PREFILL, ACTED, NOT._replace(policy="b"), ACTED], "a > b > a", 2, 3),
        ([PREFILL, ACTED, PREFILL, ACTED], "a", 2, 2),  # retracted, and prefilled again
        ([PREFILL, ACTED, PREFILL._replace(policy="b")], "a", 1, 1),
    ],
)
def test_a_request_counts_its_own_forwards(launch, forwards, policy, steps, of):
    launch(**XSHARE)
    assert count(*forwards) == {"policy": policy, "steps": steps, "of": of}


@pytest.mark.parametrize(
    ("exact", "told"),
    [(True, {"steps": 0, "exact": True}), (False, {"steps": 1, "exact": False}), (None, {"steps": 1})],
)
def test_a_request_that_asked_to_be_exact_is_told_whether_it_is(launch, exact, told):
    launch(**XSHARE)
    assert count(PREFILL, ACTED, expert_policy_exact=exact) == {"policy": "a", "of": 1, **told}


def test_without_a_stage_or_a_forward_of_one_nothing_is_counted(launch, monkeypatch):
    monkeypatch.setattr(hooks, "_stage", None)
    request = SimpleNamespace(customized_info=None)
    hooks.count(request, SimpleNamespace(**{KEY: ACTED}))
    launch(**XSHARE)
    for logits_output in (None, SimpleNamespace()):
        hooks.count(request, logits_output)
    assert request.customized_info is None


METADATA = {"policy": "a", "steps": 2, "of": 3}


@pytest.mark.parametrize(
    ("came", "reason", "expected"),
    [
        ([METADATA], {"type": "length"}, {KEY: METADATA}),
        ([METADATA], None, {}),  # a stream goes on
        ([None, None], {"type": "length"}, {}),  # of another request in the same message
        ([], {"type": "length"}, {}),
        (None, {"type": "length"}, {}),
    ],
)
def test_the_last_message_has_it(came, reason, expected):
    """SGLang lists what came in `meta_info` too, and cuts lists that it finds in `customized_info_accumulated`."""
    state = SimpleNamespace(customized_info_accumulated={} if came is None else {KEY: came})
    meta_info = {"finish_reason": reason} | ({} if came is None else {KEY: came})
    hooks.tell(meta_info, state)
    assert meta_info == {"finish_reason": reason} | expected
    assert state.customized_info_accumulated == {}


class Extension(SimpleNamespace):
    """Upstream's `SglExt`, as far as an answer on /v1 has one."""


def test_an_answer_on_v1_has_it_beside_what_upstream_has_there():
    assert hooks.extend(None, Extension, {}) is None
    given = Extension(routed_experts="abc")
    assert hooks.extend(given, Extension, {"weight_version": "default"}) is given
    assert vars(given) == {"routed_experts": "abc"}
    assert vars(hooks.extend(None, Extension, {KEY: METADATA})) == {KEY: METADATA}
    assert vars(hooks.extend(given, Extension, {KEY: METADATA})) == {"routed_experts": "abc", KEY: METADATA}


TUNED = {"k0": 1, "add": 6, "layers": {str(layer): {"add": layer % 5} for layer in range(24)}}


@pytest.mark.parametrize(
    ("keys", "named"), [({"k0": 1, "add": 6}, "xshare:k0=1,add=6"), (TUNED, "xshare, plan {}")], ids=["short", "tuned"]
)
def test_a_policy_is_named_by_its_spelling_or_by_its_hash(keys, named):
    layer = SimpleNamespace(router=SimpleNamespace(top_k=8))
    in_force = InForce(build_schedule("xshare", keys, speculative=False), layers=[layer])
    policy = in_force.spelling
    assert policy == named.format(hash_plan(dict(reversed(in_force.shown.items()))))
    assert len(policy) <= LONGEST
