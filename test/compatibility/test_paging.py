"""Paged experts: what is refused before weights load, how far graphs are captured, and what is warned of."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_xshare import Batch, Router, select
from sglang_xshare.compatibility.moe_model import MoeModel
from sglang_xshare.compatibility.paging import check_paging, find_limit, fits, list_paging_warnings
from sglang_xshare.policies.schedule import build_schedule

EXPERTS, TOP_K, SLOTS = 64, 8, 32
MODEL = MoeModel("path", "Qwen3MoeForCausalLM", 4, EXPERTS, TOP_K, "softmax", True)
SERVED = {
    **{"enable_paged_experts": True, "paged_experts_num_resident": SLOTS, "enable_eplb": False},
    **{"tp_size": 1, "ep_size": 1, "pp_size": 1, "dp_size": 1, "speculative_algorithm": None, "load_format": "auto"},
}
NUMBER = "--paged-experts-num-resident"
# Arguments, beside those of a server that is served.
REFUSED: dict[str, dict[str, Any]] = {
    "no number of slots": {"paged_experts_num_resident": None},
    "fewer slots than a row takes": {"paged_experts_num_resident": 7},
    "tensor parallelism": {"tp_size": 2},
    "expert parallelism": {"ep_size": 2},
    "replicas": {"dp_size": 2},
    "speculation": {"speculative_algorithm": "EAGLE3"},
    "experts that move": {"enable_eplb": True},
    "weights that are made up": {"load_format": "dummy"},
}


def refuse(case: str, *_: Any) -> None:
    check_paging(SimpleNamespace(**SERVED | REFUSED[case]), MODEL)


def test_what_is_served():
    check_paging(SimpleNamespace(**SERVED), MODEL)
    unpaged = {"enable_paged_experts": False, "tp_size": 2, "speculative_algorithm": "EAGLE3"}
    check_paging(SimpleNamespace(**SERVED | unpaged), MODEL)
    check_paging(SimpleNamespace(), MODEL)  # a release that pages none


def schedule(policy: str = "xshare", **keys: Any) -> Any:
    return build_schedule(policy, keys, speculative=False, pages=True)


@pytest.mark.parametrize(
    ("policy", "keys", "limit"),
    [
        (None, {}, 4),
        ("vanilla", {}, 4),
        ("observe", {}, 4),
        ("xshare", {"k0": 1, "add": 24}, 32),
        ("xshare", {"k0": 2, "add": 24}, 16),
        ("xshare", {"k0": 0, "add": 24}, 64),
        ("xshare", {"k0": 1, "add": 4, "free_residents": False}, 24),
        ("xshare", {"k0": 1, "add": 24, "max_rows": 16}, 16),
        ("xshare", {"k0": 1, "add": 24, "by_rows": {"8-12": {"policy": "vanilla"}}}, 4),
        ("lynx-lat", {"retain": 16}, 64),
    ],
)
def test_graphs_are_captured_as_far_as_all_experts_fit(monkeypatch, policy, keys, limit):
    """Of sizes 1, 2, 4, 8, ...: SGLang alone captures up to 32 // 8 = 4 requests."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 64]
    graphs = SimpleNamespace(decode=SimpleNamespace(bs=sizes))
    monkeypatch.setattr(
        "sglang_xshare.compatibility.paging.resolved", lambda args: SimpleNamespace(cuda_graph_config=graphs)
    )
    args = SimpleNamespace(expert_policy=policy, expert_policy_config=keys or None, enable_paged_experts=True)
    assert find_limit(args, 4, TOP_K, EXPERTS, SLOTS) == limit
    assert find_limit(args, 8, TOP_K, EXPERTS, EXPERTS) == (8 if policy in (None, "vanilla") else 64)


def test_what_fits_holds_of_any_logits():
    """By the reference, on logits in which every row wants other experts."""
    generator = torch.Generator().manual_seed(0)
    for keys in ({"k0": 1, "add": 24}, {"k0": 2, "add": 9}, {"k0": 1, "add": 4, "free_residents": False}):
        found = schedule(**keys)
        most = max(rows for rows in range(1, 65) if fits(found, rows, TOP_K, EXPERTS, SLOTS))
        for _ in range(20):
            logits = 9 * torch.randn(most, EXPERTS, generator=generator)
            batch = Batch(resident=torch.rand(EXPERTS, generator=generator) < 0.5, slots=SLOTS)
            out = select(logits, found.plan(0, most), Router(TOP_K), batch, backend="reference")
            assert int(out.active.sum()) <= SLOTS


def warn(keys: dict[str, Any], sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 40), **config: Any) -> list[str]:
    lines = list_paging_warnings(schedule(**keys), MODEL, SimpleNamespace(**SERVED | config), sizes)
    start = f"{NUMBER} 32: "
    assert all(line.startswith(start) and "\n" not in line for line in lines)
    return [line.removeprefix(start) for line in lines]


def test_batches_without_a_graph_and_budgets_beyond_the_slots_are_warned_of():
    graph, budget = warn({"k0": 2, "add": 8})
    assert graph.startswith("24 rows ")
    assert budget.startswith("k0 x 16 rows + add come to 40: ")
    assert warn({"k0": 1, "add": 8}, (1, 2, 4, 8, 16)) == []
    assert warn({"k0": 2, "add": 8}, ()) == []
    assert warn({"k0": 2, "add": 8}, enable_paged_experts=False) == []
    assert warn({"k0": 2, "add": 8}, paged_experts_num_resident=EXPERTS) == []
