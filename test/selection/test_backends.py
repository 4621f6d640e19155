"""Every backend against the reference: drawn cases of every policy, and by hand what a draw seldom meets."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selection.cases import DTYPES, EVERY_PLAN, KINDS, cases, fill_logits, indices, pad_columns, plans, spell
from selection.compared import CLOSE, EXACT, HAS_GPU, HERE, PLANS, compare, make_logits, make_ranks, make_routers
from sglang_xshare import Batch, Router, RunnerSlots, select
from sglang_xshare.policies import VANILLA
from sglang_xshare.selection.mask import check_maskable
from sglang_xshare.types import SCORINGS

SLOTS = [None, RunnerSlots(), RunnerSlots(empty=True, shared=1), RunnerSlots(shared=2, shared_weight=0.4, aligned=True)]
MASKED = RunnerSlots(masked=True)


def check_exact(backend, found, call):
    """Exact rows have vanilla's ids, weights and kept mass by the same backend, to the last bit."""
    logits, _, router, batch, ranks = call
    vanilla = backend(logits, VANILLA, router, dataclasses.replace(batch, exact=None), ranks)
    rows = batch.exact if batch.valid is None else batch.exact & batch.valid
    columns = found.topk_ids.shape[1]
    assert torch.equal(found.topk_ids[rows], pad_columns(vanilla.topk_ids, columns, -1)[rows])
    assert torch.equal(found.topk_weights[rows], pad_columns(vanilla.topk_weights, columns, 0.0)[rows])
    assert torch.equal(found.kept_mass[rows], vanilla.kept_mass[rows])
    assert torch.equal(found.vanilla_active, vanilla.vanilla_active)
    live = torch.ones_like(rows) if batch.valid is None else batch.valid
    if rows.any() and torch.equal(rows, live):
        assert torch.equal(found.active, vanilla.active)
        assert found.rescued == 0


def accepts(check, *given):
    try:
        check(*given)
    except ValueError:
        return False
    return True


def check_drawn(backend, data, policy, **sizes):
    case = data.draw(cases(**sizes))
    plan, slots = data.draw(plans(case, policy)), data.draw(st.sampled_from([None, *SLOTS, MASKED]))
    call = backend.place(case)
    call = call[0], plan, *call[1:]
    if not backend.serves(*call[:4]):
        with pytest.raises(ValueError, match=r"supports|not implemented by backend triton"):
            backend(*call)
        return
    if slots is MASKED and not accepts(check_maskable, plan, call[2]):
        slots = None
    found = compare(backend, *call, slots)
    assert slots is None or slots.masked or slots.empty or (found.topk_ids >= 0).all()
    if case.exact is not None:
        check_exact(backend, found if slots is None else backend(*call), call)


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("policy", EVERY_PLAN)
def test_drawn(backend, policy, many):
    """Rows in one program and in several, every router, and what a runner takes in place of empty slots."""
    examples = 30 if policy in ("vanilla", "pruned", "dynamic-skip") else 80

    @backend.settle(1000 if many else examples)
    @given(data=st.data())
    def check(data):
        check_drawn(backend, data, policy, max_experts=256 if many else 128 if backend.name == "cpu" else 64)

    check()


SHAPES = [(5, 40, SLOTS[1]), (16, 128, SLOTS[3]), (20, 160, None), (40, 64, SLOTS[3]), (0, 64, SLOTS[1])]


@pytest.mark.parametrize("text", PLANS)
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_each_plan(backend, text, shape):
    """Whatever is drawn: in one program of the kernel and in several, beside padding, exact rows and residents, in each
    dtype, by each router that the plan and the backend take. 16-bit logits take another way to break ties than fp32.
    """
    (rows, experts, slots), plan = SHAPES[shape], spell(text)
    turn = shape + len(SHAPES) * PLANS.index(text)
    row, expert = (torch.arange(size, device=backend.device) for size in (rows, experts))
    logits = make_logits(KINDS[turn % len(KINDS)], rows, experts, turn, DTYPES[turn % 3], backend.device)
    exact, resident = row % 3 == 1 if turn % 2 else None, expert % 3 != 1 if turn % 4 > 1 else None
    batch = Batch(row % 5 != 3, 2 if rows % 2 == 0 else 1, exact, resident, 12 if turn % 9 < 6 else None)
    router = list(make_routers(experts, 8, backend.device).values())[turn % 11]
    if not (accepts(plan.check_router, router) and backend.serves(logits, plan, router, batch)):
        router = Router(6)
    compare(backend, logits, plan, router, batch, slots=slots)


def test_equal_scores_reach_a_share_with_a_whole_number_of_experts(backend):
    """Each of a row's top 4 has an eighth of its score and a quarter of its utility: the expert with which S or a row
    reaches a share is its last.
    """
    for text, experts in {
        "xshare:k0=0,mass=0.25": 1,
        "xshare:k0=0,mass=0.5": 2,
        "xshare:k0=0,mass=0.50001": 3,
        "xshare:k0=4,p=0.125,add=0": 1,
        "xshare:k0=4,p=0.25,add=0": 2,
        "xshare:k0=4,p=0.25001,add=0": 3,
        "dynamic-skip:beta=1": 4,
    }.items():
        found = compare(backend, torch.zeros(3, 8, device=backend.device), spell(text), Router(4))
        assert indices(found.selected) == set(range(experts)), text


@pytest.mark.parametrize("scoring", SCORINGS)
def test_equal_scores_in_another_order_tie(backend, scoring):
    """Rows with the same few scores at other experts give every expert the same utility: the lower index wins."""
    scores = torch.tensor([1.3, 0.7, 0.1, -0.4, -1.9, -30, -30, -30])
    logits = torch.stack([scores.roll(shift) for shift in range(8)]).to(backend.device)
    found = compare(backend, logits, spell("custom:k0=0,add=3"), Router(5, scoring))
    assert indices(found.selected) == {0, 1, 2}


@pytest.mark.parametrize("backend", HERE, indirect=True)
def test_the_last_of_1024_experts_is_one_step_of_the_grid_ahead(backend):
    """All steps that break ties are less than one step of utility together, for as many experts as a layer may have."""
    logits = torch.zeros(1, 1024)
    logits[0, -1] = 2.0**-18  # a sigmoid of 0.5 + 2^-20
    found = compare(backend, logits, spell("custom:k0=0,add=1,utility=full"), Router(1, "sigmoid"))
    assert indices(found.selected) == {1023}


@pytest.mark.parametrize("mass", [0.3, 1.0])
@pytest.mark.parametrize(("rows", "experts"), [(16, 256), (300, 8)])
def test_utilities_beyond_31_bits_together_and_alone_near_them(backend, rows, experts, mass):
    """Sigmoids near 1: 4096 of them add up to 2^32, those of 300 rows to more than 2^28 an expert."""
    logits = fill_logits("normal", rows, experts, 0).to(backend.device) + 4
    found = compare(backend, logits, spell(f"xshare:k0=0,mass={mass},utility=full"), Router(2, "sigmoid"))
    assert found.selected.all() == (mass == 1)


@pytest.mark.parametrize("slices", [(slice(None), slice(3, 35)), (slice(None, None, 2), slice(None)), None])
def test_strides(backend, slices):
    """Logits that are part of a larger tensor, or lie the other way round; all that a batch has, and a bias too."""
    wide = fill_logits("normal", 32, 64, 0).to(backend.device)
    logits = wide.T if slices is None else wide[slices]
    row, expert = (torch.arange(2 * size, device=backend.device) for size in logits.shape)
    bias = torch.linspace(-1, 1, len(expert), dtype=torch.bfloat16, device=backend.device)[::2]
    marks = (row % 5 != 2)[::2], 2, (row % 7 == 0)[::2], (expert % 3 == 0)[::2]
    batch = Batch(*marks, logits.shape[1], (row % 3).int()[::2])
    router = Router(8, "sigmoid", bias, expert_scale=bias.double() + 2)
    plan = spell("xshare:k0=1,add=4,target_per_rank=5,balance=fill,acceptance=0.5,warm_rows=2")
    compare(backend, logits, plan, router, batch, (expert % 4)[::2])


@pytest.mark.parametrize("text", ["xshare:k0=1,target_per_rank=1,balance=level", "oea:k0=1,target_per_rank=1"])
def test_ranks_level_to_the_fullest_of_all_rows(backend, text):
    """An exact row holds the four experts of a rank, which a step waits for: the other rank adds as many."""
    logits = torch.tensor([[9.0, 8, 7, 6, 0, 0, 0, 0], [0, 0, 0, 0, 9, 8, 7, 6]], device=backend.device)
    row, expert = (torch.arange(size, device=backend.device) for size in logits.shape)
    out = compare(backend, logits, spell(text), Router(4), Batch(exact=row == 0), expert // 4)
    assert out.selected.all()


def test_a_confident_padding_row_does_not_vote(backend):
    """No live row is confident enough, so the most confident live row votes: expert 0, not 1, the best by utility."""
    shares = torch.tensor([[0.0, 0.0, 1.0], [0.46, 0.44, 0.1], [0.12, 0.45, 0.43]], device=backend.device)
    batch = Batch(torch.tensor([False, True, True], device=backend.device))
    logits = shares.log().clamp_min(-30)
    found = compare(backend, logits, spell("lynx-acc:confidence=0.9,min_votes=1"), Router(1), batch)
    assert indices(found.selected) == {0}


def test_groups_of_one_expert_have_no_second(backend):
    """A row's best groups are then its best experts."""
    router = Router(3, "sigmoid", torch.linspace(-1, 1, 8, device=backend.device), num_expert_group=8, topk_group=2)
    found = compare(backend, make_logits("normal", 6, 8, device=backend.device), VANILLA, router)
    assert (found.topk_ids[:, 2] == -1).all()


def test_scaling_multiplies_every_weight(backend):
    logits = fill_logits("normal", 6, 32, 0).to(backend.device)
    plain, scaled = (compare(backend, logits, spell("oea"), Router(4, "sigmoid", scaling=x)) for x in (1.0, 2.5))
    assert torch.equal(scaled.topk_weights, plain.topk_weights * 2.5)
    assert torch.equal(scaled.kept_mass, plain.kept_mass)


@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("text", PLANS)
@pytest.mark.parametrize(("rows", "experts"), [(16, 128), (64, 256)])
@pytest.mark.parametrize("marks", [False, True])
def test_graph_replay(text, rows, experts, marks):
    """A replay reads the logits, `valid` and which rows are exact that are there when it runs, again and again."""
    logits = make_logits("normal", rows, experts)
    row = torch.arange(rows, device="cuda")
    valid, exact = row >= 0, row >= 0
    call = logits, spell(text), Router(8), Batch(valid, exact=exact if marks else None), make_ranks(logits)
    select(*call, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = select(*call, backend="triton")
    for seed in range(20):
        logits.copy_(make_logits("ties", rows, experts, seed))
        valid.copy_(row % (seed + 2) != 1)
        exact.copy_(row % (seed + 1) == 0)
        graph.replay()
        expected = select(*call, backend="reference")
        for field in EXACT:
            assert torch.equal(getattr(found, field), getattr(expected, field)), (seed, field)
        assert all(getattr(found, field).isfinite().all() for field in CLOSE)
