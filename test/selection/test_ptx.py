"""The selection kernel as it is compiled for sm_90: its PTX, executed with the arguments of real launches.

It answers as the reference does in whatever order warps and programs run, in one launch or one a phase, and no two of
them touch a byte that nothing orders. A barrier of a program's threads, a release or an acquire that is missing shows
here alone: neither the captures of `test/fake_gpu` nor a GPU's own answers would tell.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fake_gpu.ptx.launcher import Execution, execute_ptx
from fake_gpu.ptx.memory import Touched
from selection.cases import fill_logits, spell
from selection.compared import check_alignment
from selection.hopper import Case
from sglang_xshare import Batch, Router, RunnerSlots, select
from sglang_xshare.selection.triton_kernel import launch

FLIPPED = -(2**31)  # where a barrier's counter may stand as well
XSHARE = "xshare:k0=1,add=24"
REACH = "oea:k0=3,max_rank=12"  # whose counters do not say what rows use
RESCUE = "moe-spec:budget=16,coverage=truncate"
VOTERS = "lynx-acc:confidence=0.5"
GROUPED = Router(8, "sigmoid", torch.linspace(-0.3, 0.3, 256), num_expert_group=8, topk_group=4, scaling=2.5)
MASKED, ALIGNED = RunnerSlots(masked=True), RunnerSlots(aligned=True)
SHARED = RunnerSlots(shared=2, shared_weight=0.4, aligned=True)
ONE = {
    "xshare": Case(XSHARE),
    "fp32": Case(XSHARE, dtype=torch.float32),
    "empty slots": Case(XSHARE, runner=RunnerSlots(empty=True)),
    "by request": Case("xshare:k0=1,add_per_request=4", tokens_per_request=4),
    "budget": Case("moe-spec:budget=32"),
    "votes": Case("lynx-lat:retain=32"),
    "voters of one program": Case(VOTERS),
    "mass": Case("xshare:mass=0.5"),
    "ranks": Case("xshare:target_per_rank=5"),
    "residents": Case("xshare:k0=1,add=4", slots=32),
    "groups": Case(XSHARE, (16, 256), GROUPED, runner=RunnerSlots(shared=1, shared_weight=0.4), dtype=torch.float32),
    "aligned": Case(XSHARE, runner=ALIGNED),
    "aligned, with fillers": Case("pruned:k0=2,p=0.5", runner=ALIGNED),
    "aligned, with shared experts": Case(RESCUE, router=Router(6), runner=SHARED),
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
SEVERAL = {"programs": Case(XSHARE), "voters": Case(VOTERS), "rescue": Case(RESCUE)}
SEVERAL |= {f"{name}, exact rows": replace(SEVERAL[name], exact=True) for name in ("voters", "rescue")}
SEVERAL |= {"programs, few of what ties": Case("xshare:k0=1,add=3")}  # which are searched by themselves
SEVERAL |= {f"programs, {name}": case for name, case in BOTH.items()}
SEVERAL = {name: replace(case, shape=(case.shape[0] + 48, case.shape[1])) for name, case in SEVERAL.items()}
SEVERAL["programs, more than eight"] = Case(XSHARE, (144, 128))  # which load their counters in two rounds
CASES = ONE | BOTH | SEVERAL | {f"launches, {name}": case for name, case in SEVERAL.items()}
COMPLETES = "programs, reach, masked"
"""One row uses too few experts: a program completes them (`cover.complete`) while others still read."""


@pytest.fixture
def run(monkeypatch):
    """A function (name of a case, seed, live rows, execution, counter) that selects by the executed PTX."""
    counter = torch.zeros(launch.CACHE_LINE, dtype=torch.int32)
    monkeypatch.setattr(launch, "INTERPRETED", True)  # which lets tensors of the CPU be

    def run(name, seed, live, execution, start):
        case, together = CASES[name], not name.startswith("launches")
        rows, experts = case.shape
        monkeypatch.setattr(launch, "_find_counter", lambda device, programs: counter if together else None)
        counter.zero_()[0] = start
        generator = torch.Generator().manual_seed(seed)
        logits = (2 * fill_logits(("normal", "ties", "equal")[seed % 3], rows, experts, seed)).to(case.dtype)
        exact, resident = (
            torch.rand(size, generator=generator) < share for size, share in ((rows, 0.3), (experts, 0.5))
        )
        batch = Batch(
            *(torch.arange(rows) < live, case.tokens_per_request, exact if case.exact else None),
            *(resident if case.slots else None, case.slots),
        )
        ranks = torch.arange(experts) * 8 // experts if "target_per_rank" in case.plan else None
        call = logits, spell(case.plan), case.router, batch, ranks
        with execute_ptx(execution):
            found = select(*call, backend="triton", slots=case.runner)
        return found, select(*call, backend="reference", slots=case.runner), counter

    return run


def find_differences(found, expected, counter):
    """The names of what is not as the reference has it, after a launch."""
    wrong = []
    for name in ("topk_ids", "selected", "active", "vanilla_active", "rescued", "masked_logits"):
        here, there = getattr(found, name), getattr(expected, name)
        if there is not None and (here is None or not torch.equal(here, there.to(here.dtype))):
            wrong.append(name)
    for name in ("topk_weights", "kept_mass"):
        if not torch.allclose(getattr(found, name), getattr(expected, name), atol=2e-6, rtol=4e-6):
            wrong.append(name)
    if found.alignment is not None:
        check_alignment(found.alignment, found.topk_ids)
    if counter[0] not in (0, FLIPPED) or counter[1:].any():
        wrong.append("counters")
    return wrong


@pytest.mark.parametrize(
    "name", [name if name in ("aligned", "programs") else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_it_answers_as_the_reference(run, name):
    case = CASES[name]
    rows, tokens = case.shape[0], case.tokens_per_request
    for seed, order, live, start in (
        (0, "up", rows, 0),
        (1, "down", rows - 3 * tokens, FLIPPED),
        (2, "random", tokens, 0),
        (3, "random", rows, FLIPPED),
        (5, "down", rows, 0),
        (0, "down", 0, 0),
    ):
        execution = Execution(order, seed)
        found, expected, counter = run(name, seed, live, execution, start)
        assert find_differences(found, expected, counter) == [], (order, seed)
        races = [race for launched in execution.launches for race in launched.races]
        if name == COMPLETES and live <= tokens:
            races = [(between, where) for between, where in races if between != "programs"]
        assert races == []
        assert (found.alignment is not None) == case.runner.aligned
        assert (len(execution.launches) == 1) == (not name.startswith("launches"))
        assert (len(execution.launches[0].programs) > 1) == (rows > 16)


def test_warps_that_write_the_same_value_do_not_race():
    """However often each does: several hold what Triton replicates."""
    touched, at, new, same = Touched.none(1), np.array([0]), np.array([True]), np.array([False])
    assert not any(touched.touch(*one) for one in ((0, at, new), (1, at, same), (1, at, same), (0, at, same)))
    assert touched.touch(2, at, None), "who reads may be earlier"
    assert touched.touch(1, at, same), "and would then be late"
    touched = Touched.none(1)
    assert [touched.touch(*access) for access in ((0, at, new), (1, at, new))] == [False, True]
