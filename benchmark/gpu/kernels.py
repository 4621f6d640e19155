"""The Triton selection kernel on this GPU: its ids against the reference's, and its time beside upstream's router.

Times are of captured CUDA graphs, a call among many, on the logits that upstream's fused router takes too; the kernel
does what that router does and selects the batch's experts besides. The former kernel, whose package `.gpu/` may bring
under another name, and upstream's router without the launch that 0.5.20 dropped are timed in turns with both.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import cycle, product
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmark.common.variant import parse_plan, parse_variant
from benchmark.gpu.checks import WORKERS, explain
from benchmark.gpu.timing import repeat, time_alternating, time_graph
from sglang_xshare import Batch, Router, RunnerSlots, select
from sglang_xshare.selection.triton_kernel import supports

PLANS = (
    "xshare",  # the default: kept mass
    "xshare:k0=1,add=24",
    "xshare:k0=1,add_per_request=4",
    "xshare:k0=1,target_per_rank=5",
    "oea:k0=3",
    "lynx-lat:retain=32",
    "moe-spec:budget=32",
)
RANKS = 8
CHECKED_ROWS = (1, 7, 16, 64, 256)
CHECKED_EXPERTS = (8, 16, 60, 128, 160, 256, 384, 512)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TIMED_ROWS, TIMED_EXPERTS = (16, 64), (128, 256)
TOP_K, TOKENS_PER_REQUEST = 8, 4
CALLS = 50  # in a graph, so that its own launch is a small part
ROUNDS = 10
FORMER = "former_xshare"
"""The package of the former kernel: ours of an earlier commit, see `scripts/gpu_bundle.sh`."""
FILLED = RunnerSlots()
DEVICE = "cuda"


def make_cases(plans: Sequence[str]) -> list[tuple[int, int, str, torch.dtype, bool]]:
    """(rows, experts, plan, dtype, tied): every shape, other choices in turn; every plan at timed shapes, in bf16."""
    by_experts = dict(zip(CHECKED_EXPERTS, zip(cycle(plans), cycle(DTYPES), strict=False), strict=False))
    cases = [
        (rows, experts, *by_experts[experts], tied)
        for rows, experts, tied in product(CHECKED_ROWS, CHECKED_EXPERTS, (False, True))
    ]
    timed = product(TIMED_ROWS, TIMED_EXPERTS, plans, (torch.bfloat16,), (True,))
    return cases + list(timed)


def check_all(cases: Sequence[tuple[int, int, str, torch.dtype, bool]], shapes: Sequence[Any]) -> list[str]:
    """What differs or fails in every case, in processes side by side, which compile timed kernels as well."""
    with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
        for shape in shapes:
            pool.submit(compile_kernels, *shape)  # one that fails is found when it is timed
        differences = pool.map(_try_case, *zip(*cases, strict=True))
        found = track(differences, "checking", total=len(cases), console=Console(stderr=True))
        return [one for one in found if one is not None]


def _try_case(rows: int, experts: int, spelling: str, dtype: torch.dtype, tied: bool) -> str | None:
    try:
        return check(rows, experts, spelling, dtype, tied)
    except Exception as error:  # a kernel that does not compile or launch is one case's
        return f"{spelling} on {rows} x {experts} {dtype}{', tied' * tied}: {explain(error)}"


def check(rows: int, experts: int, spelling: str, dtype: torch.dtype, tied: bool) -> str | None:
    """What differs from the reference on random logits with a tenth of the rows padding; None where nothing does."""
    plan, batch = parse_plan(spelling, rows), _make_batch(spelling, rows)
    router = Router(min(TOP_K, experts))
    logits = _make_logits(rows, experts, dtype)
    logits = logits.round() if tied else logits
    batch = Batch(torch.arange(rows, device=DEVICE) % 10 != 7, batch.tokens_per_request)
    if not supports(plan, router, batch, rows, experts):
        raise RuntimeError(f"{spelling} on {rows} x {experts}: the kernel does not serve it")
    ranks = _make_ranks(experts)
    expected = select(logits, plan, router, batch, ranks, backend="reference")
    found = select(logits, plan, router, batch, ranks, backend="triton")
    for field in ("topk_ids", "selected", "active", "vanilla_active"):
        if not torch.equal(getattr(found, field), getattr(expected, field)):
            return f"{field} of {spelling} on {rows} x {experts} {dtype}{', tied' * tied}: not the reference's"
    filled = select(logits, plan, router, batch, ranks, backend="triton", slots=FILLED)
    expected = select(logits, plan, router, batch, ranks, backend="reference", slots=FILLED)
    if not torch.equal(filled.topk_ids, expected.topk_ids):
        return f"filled slots of {spelling} on {rows} x {experts} {dtype}{', tied' * tied}: not the reference's"
    return None


def measure(rows: int, experts: int, spelling: str) -> dict[str, Any]:
    """Return microseconds of select() with a policy, as a layer calls it, and of the routers and kernel beside it."""
    logits = _make_logits(rows, experts, torch.bfloat16)
    calls = {
        "us": make_call(rows, experts, spelling),
        "former_us": make_call(rows, experts, spelling, FORMER) if find_spec(FORMER) else None,
        "upstream_us": _make_upstream(logits),
        "upstream_later_us": _make_later_upstream(logits),
    }
    runs = {name: partial(repeat, call, CALLS) for name, call in calls.items() if call is not None}
    found = {name: median(times) for name, times in time_alternating(runs, ROUNDS, CALLS).items()}
    return {"policy": spelling, "rows": rows, "experts": experts, **found}


def compile_kernels(rows: int, experts: int, spelling: str) -> None:
    """Compile what `measure` needs into Triton's cache."""
    make_call(rows, experts, spelling)()
    if find_spec(FORMER):
        make_call(rows, experts, spelling, FORMER)()


def time_call(call: Callable[[], object]) -> float:
    """Median microseconds of a call, one of many in a CUDA graph."""
    return time_graph(partial(repeat, call, CALLS)) / CALLS


def make_call(rows: int, experts: int, spelling: str, package: str = "sglang_xshare") -> Callable[[], object]:
    """Return select() by the kernel of a package of ours, on logits in bf16, as a layer calls it."""
    ours = import_module(package)
    plan: Any = parse_plan(spelling, rows)
    if package == FORMER:
        variant = parse_variant(spelling)
        plan = import_module(f"{package}.policies").get_policy(variant.policy).build(variant.keys)
    logits, ranks = _make_logits(rows, experts, torch.bfloat16), _make_ranks(experts)
    batch = ours.Batch(tokens_per_request=_make_batch(spelling, rows).tokens_per_request)
    return partial(ours.select, logits, plan, ours.Router(TOP_K), batch, ranks, "triton", slots=ours.RunnerSlots())


def _make_upstream(logits: torch.Tensor) -> Callable[[], object]:
    # What the server's router ends in: with CUDA, from 0.5.17 on, a Triton kernel and the zeros of its bias, no longer
    # sgl_kernel's topk_softmax.
    router = import_module("sglang.srt.layers.moe.topk").fused_topk
    return partial(router, logits, logits, TOP_K, True)  # of hidden states it reads rows and device


def _make_later_upstream(logits: torch.Tensor) -> Callable[[], object] | None:
    """Return the same router without the zeros of its bias, as it is from 0.5.20 on; None where it has another name."""
    try:
        gate = import_module("sglang.kernels.ops.moe.moe_fused_gate").moe_fused_gate
    except (ImportError, AttributeError):
        return None
    zeros = torch.zeros(logits.shape[1], dtype=torch.float32, device=logits.device)
    return partial(gate, logits, zeros, TOP_K, scoring_func="softmax", renormalize=True)


def _make_logits(rows: int, experts: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * experts)
    return (2 * torch.randn(rows, experts, generator=generator)).to(DEVICE, dtype)


def _make_ranks(experts: int) -> torch.Tensor:
    """[experts]: in contiguous blocks."""
    return torch.arange(experts, device=DEVICE) * RANKS // experts


def _make_batch(spelling: str, rows: int) -> Batch:
    groups = parse_plan(spelling).add_per_request and rows % TOKENS_PER_REQUEST == 0
    return Batch(tokens_per_request=TOKENS_PER_REQUEST if groups else 1)
