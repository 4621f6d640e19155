"""What the selection kernel is checked and timed on, and its sorted slots held to upstream's; without a GPU."""

import inspect
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock, create_autospec

import pytest
import torch
from sglang.srt.layers.moe import topk

from benchmark.common.variant import parse_plan
from benchmark.gpu import kernels
from sglang_xshare import Batch, Router
from sglang_xshare.selection.triton_kernel import supports
from sglang_xshare.types import Alignment


def test_every_case_is_served():
    for rows, experts, plan, _, _ in kernels.make_cases(kernels.PLANS):
        batch = Batch(tokens_per_request=4 if "per_request" in plan and rows % 4 == 0 else 1)
        assert supports(parse_plan(plan), Router(8), batch, rows, experts)


def test_upstreams_time_is_of_what_its_server_runs(monkeypatch):
    """Called as upstream declares it."""
    align, router = Mock(), create_autospec(topk.fused_topk, return_value=("weights", "ids"))
    monkeypatch.setattr(kernels, "_import_align", lambda: align)
    monkeypatch.setattr(topk, "fused_topk", router)
    logits = torch.zeros(16, 128)
    assert kernels._make_upstream(logits, sort=False)() == ("weights", "ids")
    kernels._make_upstream(logits, sort=True)()
    for call in router.call_args_list:
        given = inspect.signature(router).bind(*call.args, **call.kwargs).arguments
        assert given["gating_output"] is logits
        assert (given["topk"], given["renormalize"]) == (8, True)
    assert router.call_count == 2
    align.assert_called_once_with("ids", kernels.BLOCK_SIZE, 128)


def test_all_that_differs_or_fails_is_found(monkeypatch):
    def check(rows, *_):
        if rows == 7:
            raise RuntimeError("out of resource: shared memory\nat length")
        return None if rows < 33 else f"{rows} rows differ"

    monkeypatch.setattr(kernels, "ProcessPoolExecutor", lambda workers, _: ThreadPoolExecutor(workers))
    monkeypatch.setattr(kernels, "compile_kernels", lambda *_: pytest.fail("it is found when it is timed"))
    monkeypatch.setattr(kernels, "check", check)
    cases = [(rows, 8, "oea:k0=3", torch.float32, True) for rows in (1, 7, 33, 64)]
    assert kernels.check_all(cases, [(16, 128, "oea:k0=3")]) == [
        "oea:k0=3 on 7 x 8 torch.float32, tied: out of resource: shared memory",
        "33 rows differ",
        "64 rows differ",
    ]


@pytest.fixture
def sorted_batch(monkeypatch):
    """Filled slots, and how upstream sorts them: an expert's in any order."""
    ids = torch.tensor([[2, 0], [1, 2], [2, 2]], dtype=torch.int32)
    upstream = [torch.tensor(x, dtype=torch.int32) for x in ([1, 6, 2, 6, 5, 4, 3, 0], [0, 1, 2, 2], [8])]
    monkeypatch.setattr(kernels, "BLOCK_SIZE", 2)
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    monkeypatch.setattr(kernels, "_import_align", lambda: lambda *args: upstream)

    def make(slots, experts, length):
        tensors = [torch.tensor(x, dtype=torch.int32) for x in (slots, experts, [length])]
        return SimpleNamespace(topk_ids=ids, alignment=Alignment(*tensors, 2))

    return make


@pytest.mark.parametrize(
    ("slots", "experts", "length", "right"),
    [
        ([1, 6, 2, 6, 0, 3, 4, 5, 6, 6], [0, 1, 2, 2, 77], 8, True),
        ([1, 6, 2, 6, 0, 3, 4, 4, 6, 6], [0, 1, 2, 2, 77], 8, False),
        ([2, 6, 1, 6, 0, 3, 4, 5, 6, 6], [0, 1, 2, 2, 77], 8, False),
        ([1, 6, 2, 6, 0, 3, 4, 5, 6, 6], [0, 1, 1, 2, 77], 8, False),
        ([1, 6, 2, 6, 0, 3, 4, 5, 6, 6], [0, 1, 2, 2, 77], 10, False),
    ],
    ids=["as upstream's", "a slot twice", "slots of other experts", "another block's expert", "longer"],
)
def test_sorted_slots_are_held_to_upstreams(sorted_batch, slots, experts, length, right):
    assert kernels._is_sorted(sorted_batch(slots, experts, length), 3) is right
