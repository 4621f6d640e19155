"""The selection kernel as it is compiled for sm_90: its PTX, executed with the arguments of real launches.

It answers as the reference does in whatever order warps and programs run, in one launch or one a phase, and no two of
them touch a byte that nothing orders. If a barrier of a program's threads, a release or an acquire is left out, that
shows: neither the captures of `test/fake_gpu` nor a GPU's own answers would tell.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton

from fake_gpu.ptx.launcher import Execution, execute_ptx
from fake_gpu.ptx.memory import Touched
from selection.cases import fill_logits, spell
from selection.compared import check_alignment, check_same
from selection.hopper import Case
from sglang_xshare import Batch, Router, RunnerSlots, select
from sglang_xshare.selection.triton_kernel import launch

FLIPPED = -(2**31)  # where a barrier's counter may stand as well
BIAS = torch.linspace(-0.3, 0.3, 256)
XSHARE = "xshare:k0=1,add=24"
MASKED, ALIGNED = RunnerSlots(masked=True), RunnerSlots(aligned=True)
REACH = "oea:k0=3,max_rank=12"  # whose counters do not say what rows use
RESCUE = "moe-spec:budget=16,coverage=truncate"
GROUPED = Router(8, "sigmoid", BIAS, num_expert_group=8, topk_group=4, scaling=2.5)
SHARED = RunnerSlots(shared=1, shared_weight=0.4)
ONE = {
    "xshare": Case(XSHARE),
    "fp32": Case(XSHARE, dtype=torch.float32),
    "empty slots": Case(XSHARE, runner=RunnerSlots(empty=True)),
    "by request": Case("xshare:k0=1,add_per_request=4", tokens_per_request=4),
    "budget": Case("moe-spec:budget=32"),
    "votes": Case("lynx-lat:retain=32"),
    "mass": Case("xshare:mass=0.5"),
    "ranks": Case("xshare:target_per_rank=5"),
    "residents": Case("xshare:k0=1,add=4", slots=32),
    "groups": Case(XSHARE, (16, 256), GROUPED, runner=SHARED, dtype=torch.float32),
    "aligned": Case(XSHARE, runner=ALIGNED),
    "aligned, with fillers": Case("pruned:k0=2,p=0.5", runner=ALIGNED),
    "aligned, with shared experts": Case(RESCUE, router=Router(6), runner=replace(SHARED, shared=2, aligned=True)),
    "aligned, odd": Case(XSHARE, (13, 60), runner=ALIGNED),
}
BOTH = {
    "masked": Case(XSHARE, router=Router(4), runner=MASKED),
    "exact rows": Case(XSHARE, exact=True),
    "reach": Case(REACH),
    "reach, masked": Case(REACH, router=Router(4), runner=MASKED),
    "odd": Case(XSHARE, (13, 60)),
    "odd, masked": Case(XSHARE, (13, 60), Router(4), runner=MASKED),
}
SEVERAL = {"programs": Case(XSHARE), "voters": Case("lynx-acc:confidence=0.5"), "rescue": Case(RESCUE)}
SEVERAL |= {f"{name}, exact rows": replace(SEVERAL[name], exact=True) for name in ("voters", "rescue")}
SEVERAL |= {f"programs, {name}": case for name, case in BOTH.items()}
SEVERAL = {name: replace(case, shape=(61 if "odd" in name else 64, case.shape[1])) for name, case in SEVERAL.items()}
CASES = ONE | BOTH | SEVERAL
CASES |= {f"launches, {name}": replace(case, together=False) for name, case in SEVERAL.items()}
COMPLETES = "programs, reach, masked"
"""One row uses too few experts: a program completes them (`cover.complete`) while others still read."""


@pytest.fixture
def run(monkeypatch):
    """A function (case, seed, live rows, execution, counter) that selects by the executed PTX."""
    counter = torch.zeros(launch.CACHE_LINE, dtype=torch.int32)
    monkeypatch.setattr(launch, "INTERPRETED", True)  # which lets tensors of the CPU be
    monkeypatch.setattr(launch, "_find_counter", lambda device, programs: counter if together else None)
    together = True

    def run(case, seed, live, execution, start=0):
        nonlocal together
        together = case.together
        counter.zero_()[0] = start
        (rows, experts), generator = case.shape, torch.Generator().manual_seed(seed)
        logits = (2 * fill_logits(("normal", "ties", "equal")[seed % 3], rows, experts, seed)).to(case.dtype)
        batch = Batch(
            torch.arange(rows) < live,
            case.tokens_per_request,
            torch.rand(rows, generator=generator) < 0.3 if case.exact else None,
            torch.rand(experts, generator=generator) < 0.5 if case.slots else None,
            case.slots,
        )
        ranks = torch.arange(experts) * 8 // experts if "target_per_rank" in case.plan else None
        call = logits, spell(case.plan), case.router, batch, ranks
        with execute_ptx(execution):
            found = select(*call, backend="triton", slots=case.runner)
        return found, select(*call, backend="reference", slots=case.runner), counter

    return run


def check(found, expected, counter):
    """Compare an answer with the reference's, and the counters with those of a launch to come."""
    check_same(found, expected, atol=2e-6, rtol=4e-6)
    if found.alignment is not None:
        check_alignment(found.alignment, found.topk_ids)
    assert counter[0] in (0, FLIPPED)
    assert not counter[1:].any()


@pytest.mark.parametrize(
    "name", [name if name in ("aligned", "programs") else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_it_answers_as_the_reference(run, name):
    case = CASES[name]
    (rows, _), tokens = case.shape, case.tokens_per_request
    for seed, order, live, start in (
        (0, "up", rows, 0),
        (1, "down", rows - 3 * tokens, FLIPPED),
        (2, "random", tokens, 0),
        (3, "random", rows, FLIPPED),
    ):
        print(f"{order=} {seed=} {live=}")  # pytest shows it if the case fails
        execution = Execution(order, seed)
        found, expected, counter = run(case, seed, live, execution, start)
        check(found, expected, counter)
        races = [race for launched in execution.launches for race in launched.races]
        if name == COMPLETES and live == tokens:
            races = [(between, where) for between, where in races if between != "programs"]
        assert races == []
        assert (found.alignment is not None) == case.runner.aligned
        assert (len(execution.launches) == 1) == case.together
        assert (len(execution.launches[0].programs) > 1) == (rows > 16)


def test_warps_that_write_the_same_value_do_not_race():
    """However often each does: several hold what Triton replicates."""
    touched, at, new, same = Touched.none(1), np.array([0]), np.array([True]), np.array([False])
    assert [touched.touch(*access) for access in ((0, at, new), (1, at, same), (1, at, same), (0, at, same))] == [
        False
    ] * 4
    assert touched.touch(2, at, None), "who reads may be earlier"
    assert touched.touch(1, at, same), "and would then be late"
    touched = Touched.none(1)
    assert [touched.touch(*access) for access in ((0, at, new), (1, at, new))] == [False, True]


def leave_out(numbers):
    """A function on PTX that leaves out the bar.sync of these numbers."""

    def edit(ptx):
        parts = re.split(r"bar\.sync", ptx)
        joints = ["bar.warp.sync" if number in numbers else "bar.sync" for number in range(len(parts) - 1)]
        return "".join(part + joint for part, joint in zip(parts, [*joints, ""], strict=True))

    return edit


def weaken(what):
    """A function on PTX that makes every release or acquire relaxed."""
    return lambda ptx: re.sub(rf"\.{what}\.", ".relaxed.", ptx)


def find_signs(run, case, live, order, edit, seed=0):
    """What shows that the PTX was edited: races, differences, errors."""
    signs = set()
    execution = Execution(order, edit=edit)
    try:
        check(*run(case, seed, live, execution))
    except (AssertionError, RuntimeError, TimeoutError) as error:
        signs.add(type(error).__name__)
    return signs | {between for launched in execution.launches for between, _ in launched.races}


def count_barriers(run, case):
    counts = []

    def count(ptx):
        counts.append(ptx.count("bar.sync"))
        return ptx

    run(case, 0, case.shape[0], Execution("up", watch=False, edit=count))
    return counts[0]


@pytest.mark.long
@pytest.mark.parametrize(("name", "unneeded", "total"), [("xshare", 3, 7), ("programs", 6, 27)])
def test_a_barrier_that_is_left_out_shows(run, name, unneeded, total):
    """A few show nothing beside all others: Triton puts one before and behind each atomic operation, where we have put
    one, and between accesses that are a thread's own.

    More than eight programs load their counters in two rounds; without a live row the filler is asked of all programs;
    experts that tie at the threshold are searched by themselves.
    """
    case = CASES[name]
    rows, experts = case.shape
    launches = [(case, rows, order, 0) for order in ("down", "up", "random")] + [(case, 0, "down", 0)]
    few = replace(case, plan="xshare:k0=1,add=3")  # of the seven that equal rows leave beside the one they hold
    launches += [(few, rows, order, 2) for order in ("down", "up", "random")]
    if rows > 16:
        launches.append((replace(case, shape=(144, experts)), 144, "down", 0))
    left_out = set()
    barriers = count_barriers(run, case)
    assert barriers == total or triton.__version__ != "3.9.0"
    for number in range(barriers):
        edit = leave_out(left_out | {number})
        if not any(find_signs(run, one, live, order, edit, seed) for one, live, order, seed in launches):
            left_out.add(number)
    assert len(left_out) <= unneeded < barriers, f"{sorted(left_out)} of {barriers}"


@pytest.mark.long
@pytest.mark.parametrize("what", ["release", "acquire"])
def test_what_orders_programs_is_needed(run, what):
    case = CASES["programs"]
    signs = [find_signs(run, case, case.shape[0], order, weaken(what)) for order in ("up", "down", "random")]
    assert "programs" in set.union(*signs)
