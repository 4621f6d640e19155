"""The selection kernel compiles for Hopper at every number of experts that a served family has.

From the launches themselves, without a GPU: a kernel that the interpreter runs, and that compiles for one width, may
change a shape in its loop at another.
"""

from itertools import product

import pytest
from triton.backends.compiler import GPUTarget

from benchmark.gpu.compilation import EXPERTS, FORMS, MANY_ROWS, run_steps
from selection.compared import HAS_GPU
from selection.hopper import compiling
from sglang_xshare import RunnerSlots, build_plan
from sglang_xshare.selection.triton_kernel import launch
from sglang_xshare.selection.triton_kernel.tile import count_programs

pytestmark = pytest.mark.skipif(HAS_GPU, reason="there is a GPU: the preflight of `make gpu` launches them on it")
PLANS = {
    "xshare": build_plan("xshare", k0=1, add=4),
    "xshare by mass": build_plan("xshare", p=0.5, k0=2, mass=0.5, own_share=0.5),
    "xshare by rank": build_plan("xshare", target_per_rank=1),
    "xshare per request": build_plan("xshare", add_per_request=4),
    "oea": build_plan("oea", k0=1, max_rank=6),
    "lynx-lat": build_plan("lynx-lat", drop=2),
    "lynx-acc": build_plan("lynx-acc", confidence=0.5),
    "moe-spec": build_plan("moe-spec", budget=6, coverage="truncate"),
    "dynamic-skip": build_plan("dynamic-skip", beta=0.5),
}
MASKED = RunnerSlots(masked=True)


@pytest.mark.parametrize(
    "experts", [one if one in (32, 128, 256, 512) else pytest.param(one, marks=pytest.mark.long) for one in EXPERTS]
)
def test_they_compile(experts):
    """One plan's selection for 16 rows; the others, and rare numbers of experts, are left to the long tests."""
    with compiling() as compiled:
        run_steps(experts, "cpu")
    assert compiled.kernels


@pytest.mark.parametrize("experts", [128, 256])
def test_programs_that_meet_compile(experts, monkeypatch):
    """In one launch, as rows 17 to 32 of 256 experts are served; the other numbers are left to the long tests."""
    together = []
    monkeypatch.setattr(launch, "count_programs", lambda *args: together.append(count_programs(*args)) or together[-1])
    with compiling() as compiled:
        run_steps(experts, "cpu", rows=FORMS[" in programs that meet"])
    assert compiled.kernels
    assert min(together) > 1


@pytest.mark.long
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("plan", PLANS)
def test_every_kind_of_plan_compiles(plan, experts):
    """A plan compiles for one program and for several that meet, and three kinds with a launch for each phase."""
    tokens_per_request = 4 if PLANS[plan].add_per_request else 1
    for rows, together in ((8, True), (MANY_ROWS, True), (MANY_ROWS, False)):
        if together or plan in ("xshare", "lynx-acc", "moe-spec"):
            with compiling(together=together):
                run_steps(experts, "cpu", PLANS[plan], rows, tokens_per_request=tokens_per_request)


@pytest.mark.long
@pytest.mark.parametrize("experts", EXPERTS)
def test_masked_logits_compile(experts):
    for rows in (8, MANY_ROWS):
        with compiling():
            run_steps(experts, "cpu", rows=rows, slots=MASKED)


@pytest.mark.long
@pytest.mark.parametrize("experts", [32, 128, 256])
@pytest.mark.parametrize("arch", [80, 89, 100, 120])
def test_they_compile_for_other_gpus(arch, experts):
    """A100, L40S, B200 and RTX 5090: in one program, in several that meet, and in a launch for each phase."""
    gpu = GPUTarget("cuda", arch, 32)
    for rows, slots in product((8, MANY_ROWS), (RunnerSlots(), MASKED)):
        with compiling(gpu=gpu) as compiled:
            run_steps(experts, "cpu", rows=rows, slots=slots)
        assert {one.metadata.target.arch for one in compiled.kernels.values()} == {arch}
    with compiling(gpu=gpu, together=False):
        run_steps(experts, "cpu", rows=MANY_ROWS)
