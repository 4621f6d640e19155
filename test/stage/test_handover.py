"""The alignment that the MoE runner gets beside ids: one of exactly these ids, once; else upstream's."""

import dataclasses
from typing import Any

import pytest
import torch

from selection.compared import check_alignment
from sglang_xshare import Batch, build_plan, hooks, selection
from sglang_xshare.selection.alignment import align_pairs, count_blocks
from sglang_xshare.stage import handover
from sglang_xshare.stage.frame import ModelForward
from sglang_xshare.stage.gather import Gather
from sglang_xshare.stage.handover import Offer
from sglang_xshare.stage.layer import DROPPED, Layer
from sglang_xshare.stage.step import Step
from sglang_xshare.types import Alignment
from stage.fake import EXPERTS, TOP_K, XSHARE, Config, put_in_step, run

ROWS = 6
PLAN = build_plan("xshare", k0=1, add=2)


class Upstream:
    """Stands in for `moe_align_block_size`, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: torch.Tensor, block_size: int, num_experts: int) -> tuple[torch.Tensor, ...]:
        self.calls += 1
        return align_pairs(ids, block_size)


@pytest.fixture(autouse=True)
def _start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test hands alignments over as a server does."""
    monkeypatch.setattr(handover, "is_prebuilt", True)
    handover.taken.clear()


@pytest.fixture
def aligns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every backend writes alignments, as the Triton kernel does for a small batch."""

    def select(*args: Any, **keys: Any) -> Any:
        found = selection.select(*args, **keys)
        slots = keys["slots"]
        return dataclasses.replace(found, alignment=align_pairs(found.topk_ids)) if slots and slots.aligned else found

    monkeypatch.setattr("sglang_xshare.stage.layer.select", select)
    monkeypatch.setattr("sglang_xshare.stage.layer.prepare_call", lambda *args: None)


def make_ids(rows: int = ROWS) -> torch.Tensor:
    return torch.arange(rows * TOP_K, dtype=torch.int32).view(rows, TOP_K) % 5


def make_layer(config: Config | None = None, **options: Any) -> Layer:
    layer = Layer(0, config or Config(), None, **options)
    put_in_step(layer, PLAN, Step("decode", ROWS, Batch()))
    return layer


def route(layer: Layer, seed: int = 0, topk: int = TOP_K, **keys: Any) -> torch.Tensor:
    """Select, and finish as upstream's `select_experts` does; returns the ids for the runner."""
    logits = torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    weights, ids = layer.choose(logits, logits, topk, True)
    return layer.finish(ids, weights, **keys)


def offer(*made: Any) -> ModelForward:
    """A forward that offers an alignment."""
    model_forward = ModelForward(None, [])
    model_forward.offer = Offer(*made)
    return model_forward


def align(model_forward: ModelForward, ids: torch.Tensor, block: int = 16, experts: int = EXPERTS) -> tuple[Any, int]:
    """(what the runner gets, whether upstream computed it)."""
    upstream = Upstream()
    return handover.align(model_forward.offer, upstream, ids, block, experts), upstream.calls


def test_without_an_offer_upstream_answers():
    ids = make_ids()
    answer = align_pairs(ids)
    assert handover.align(None, lambda *args: (answer, args), ids, 16, 5) == (answer, (ids, 16, 5))
    assert not handover.taken


def test_what_is_offered_is_taken_once():
    ids, untaken = make_ids(), {ROWS, 3}
    made = align_pairs(ids)
    model_forward = offer(ids, 9, made, untaken)
    found, calls = align(model_forward, ids, experts=9)
    check_alignment(Alignment(*found), ids)
    assert (calls, untaken) == (0, {3})
    blocks = count_blocks(9, ids.numel())
    assert blocks < len(made.expert_ids), "programs for a block a pair would be launched"
    assert [len(one) for one in found] == [16 * blocks, blocks, 1]
    assert found[0].data_ptr() == made.sorted_token_ids.data_ptr()
    assert align(model_forward, ids, experts=9)[1] == 1
    assert handover.taken == {"prebuilt": 1}


def test_other_ids_get_upstreams_answer_and_leave_the_offer():
    ids = make_ids()
    model_forward = offer(ids, 9, align_pairs(ids), set())
    others = (ids.clone(), ids[:3], ids[:, :2], ids.view(-1, 2 * TOP_K), ids.view(torch.float32), ids.view(TOP_K, -1))
    for other in (*others, ids.as_strided(ids.shape, (1, ROWS))):
        assert handover.align(model_forward.offer, lambda *args: args, other, 16, 9) == (other, 16, 9)
    whose = "experts that a rank has alone, or slots that experts are paged into"
    assert align(model_forward, ids, experts=8)[1] == 1, whose
    assert align(model_forward, ids.view(ROWS, TOP_K), experts=9)[1] == 0, "a view of all of them is the same ids"


def test_an_alignment_in_other_blocks_is_left():
    ids, untaken = make_ids(40), {40}
    model_forward = offer(ids, 9, align_pairs(ids), untaken)
    found, calls = align(model_forward, ids, 64, 9)
    assert (calls, dict(handover.taken), untaken) == (1, {"upstream": 1}, {40})
    assert len(found[1]) == 160
    check_alignment(Alignment(*found), ids, 64)
    assert align(model_forward, ids, 16, 9)[1] == 1


def test_the_storage_of_ids_is_not_used_again_while_they_are_offered():
    """The offer holds a reference, so no other tensor gets the storage."""
    ids = make_ids()
    place = ids.data_ptr()
    model_forward = offer(ids, 9, align_pairs(ids), set())
    del ids
    others = [make_ids() for _ in range(100)]
    assert place not in {other.data_ptr() for other in others}
    assert model_forward.offer is not None


@pytest.mark.parametrize("shared", [0, 1])
def test_a_layer_offers_the_alignment_of_its_ids(aligns, shared):
    """A fused shared expert has blocks of its own."""
    groups = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2} if shared else {}
    layer = make_layer(Config(TOP_K + shared, num_fused_shared_experts=shared, **groups))
    for seed in range(3):
        ids = route(layer, seed, TOP_K + shared)
        found, calls = align(layer.model_forward, ids, experts=EXPERTS + shared)
        assert (calls, ids.shape) == (0, (ROWS, TOP_K + shared))
        assert len(found[1]) == count_blocks(EXPERTS + shared, ids.numel())
        check_alignment(Alignment(*found), ids)


def test_layers_can_be_kept_from_handing_over(aligns):
    handover.is_prebuilt = False
    layer = make_layer()
    route(layer)
    assert layer.model_forward.offer is None
    handover.is_prebuilt = True
    assert align(layer.model_forward, route(layer))[1] == 0


def test_ids_that_upstream_has_changed_get_upstreams_answer(aligns):
    """Padding rows are overwritten in place; renumbered ids are a new tensor."""
    layer = make_layer()
    ids = route(layer, num_token_non_padded=torch.tensor(4))
    assert layer.model_forward.offer is None, "of ids that are not those of its alignment"
    assert align(layer.model_forward, ids)[1] == 1
    layer = make_layer()  # the first one's alignment was not taken, so it makes no other
    weights, ids = layer.choose(torch.zeros(1), torch.randn(ROWS, EXPERTS), TOP_K, True)
    renumbered = ids.clone()
    layer.finish(renumbered, weights)
    assert align(layer.model_forward, renumbered)[1] == 1
    assert not handover.taken


@pytest.mark.parametrize("options", [{"renumbers": True}, {"convention": DROPPED}, {"paging": object()}])
def test_layers_whose_ids_are_not_final_offer_nothing(aligns, options):
    layer = make_layer(**options)
    assert align(layer.model_forward, route(layer))[1] == 1
    assert not handover.taken


def test_a_rank_that_keeps_its_own_rows_offers_nothing(aligns, monkeypatch):
    layer = make_layer()
    put_in_step(layer, PLAN, Step("decode", 2 * ROWS, Batch(), Gather((ROWS, ROWS), 0)))
    monkeypatch.setattr(layer, "collect", lambda logits: torch.cat([logits, logits]))
    ids = route(layer)
    assert ids.shape == (ROWS, TOP_K)
    assert align(layer.model_forward, ids)[1] == 1
    assert not layer.offers.untaken


def test_an_alignment_that_is_not_taken_is_not_written_again(aligns):
    """The runner has blocks of another size, or never calls `align`."""
    layer = make_layer()
    assert align(layer.model_forward, route(layer), 64)[1] == 1
    assert layer.offers.untaken == {ROWS}
    assert align(layer.model_forward, route(layer))[1] == 1
    assert layer.model_forward.selections[0] is not None
    assert layer.model_forward.selections[0].alignment is None
    layer.offers.untaken.clear()
    assert align(layer.model_forward, route(layer))[1] == 0
    assert not layer.offers.untaken


def test_a_forward_leaves_no_offer(aligns, build):
    """An offer that no runner takes keeps tensors until the forward ends, also when an exception ends it."""
    (model, installed), offers = build(**XSHARE), []
    current_frame = installed.current_frame

    class Failed(Exception):
        pass

    def route(config: Any, logits: torch.Tensor) -> Any:
        routed = routing(config, logits)
        choose = routed.custom_routing_function

        def finish(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            weights, ids = choose(*args)
            hooks.finish(routed, ids, weights)
            offers.append(current_frame.model_forward.offer)
            if len(offers) == 3:
                hooks.align(Upstream(), ids, 16, EXPERTS)
                assert offers[-1].is_used
            return weights, ids

        return dataclasses.replace(routed, custom_routing_function=finish)

    routing = hooks.route
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "route", route)
        run(model, "decode", 8)
        assert [len(offer.ids) for offer in offers if offer] == [8] * 3
        assert handover.taken == {"prebuilt": 1}
        assert current_frame.frame is None
        model.error = Failed()
        with pytest.raises(Failed):
            run(model, "decode", 8)
        assert len(offers) == 6
        assert current_frame.frame is None
