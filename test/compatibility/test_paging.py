"""Paged experts: how far graphs are captured."""

from types import SimpleNamespace
from typing import Any

import torch

from sglang_xshare import Batch, Router, select
from sglang_xshare.compatibility import paging
from sglang_xshare.compatibility.paging import find_limit, fits
from sglang_xshare.policies.schedule import build_schedule

EXPERTS, TOP_K, SLOTS = 64, 8, 32


def schedule(policy: str = "xshare", **keys: Any) -> Any:
    return build_schedule(policy, keys, speculative=False, pages=True)


def test_graphs_are_captured_as_far_as_all_experts_fit(monkeypatch):
    """The list has the sizes 1, 2, 4, 8, ... Without a policy SGLang captures up to 32 // 8 = 4 requests."""
    graphs = SimpleNamespace(decode=SimpleNamespace(bs=[1, 2, 4, 8, 16, 24, 32, 64]))
    monkeypatch.setattr(paging, "resolved", lambda args: SimpleNamespace(cuda_graph_config=graphs))

    def limit(args: Any, requests: int, slots: int | None) -> int:
        return find_limit(args, requests, TOP_K, EXPERTS, slots)

    for policy, keys, most in (
        (None, {}, 4),
        ("vanilla", {}, 4),
        ("observe", {}, 4),
        ("xshare", {"k0": 1, "add": 24}, 32),
        ("xshare", {"k0": 2, "add": 24}, 16),
        ("xshare", {"k0": 0, "add": 24}, 64),
        ("xshare", {"k0": 1, "add": 4, "free_residents": False}, 28),
        ("xshare", {"k0": 1, "add": 24, "max_rows": 16}, 16),
        ("xshare", {"k0": 1, "add": 24, "by_rows": {"8-12": {"policy": "vanilla"}}}, 7),
        ("lynx-lat", {"retain": 16}, 64),
    ):
        args = SimpleNamespace(expert_policy=policy, expert_policy_config=keys or None, enable_paged_experts=True)
        # Slots that SGLang has yet to size fit nothing.
        found = limit(args, 8, None), limit(args, 4, SLOTS), limit(args, 8, EXPERTS)
        assert (policy, keys, *found) == (policy, keys, 8, most, 8 if policy in (None, "vanilla") else 64)
    args = SimpleNamespace(expert_policy="lynx-lat", expert_policy_config={"retain": 16}, enable_paged_experts=True)
    graphs.decode.bs = [1]
    assert limit(args, 4, SLOTS) == 64, "the next layer, after the first has limited the list"
    graphs.decode.bs = None
    assert limit(args, 8, SLOTS) == 8, "no graph is captured"


def test_what_fits_holds_of_any_logits():
    """By the reference, on logits in which every row wants other experts."""
    assert [fits(None, rows, TOP_K, EXPERTS, SLOTS) for rows in (4, 5)] == [True, False]
    generator = torch.Generator().manual_seed(0)
    for keys in ({"k0": 1, "add": 24}, {"k0": 2, "add": 9}, {"k0": 1, "add": 4, "free_residents": False}):
        found = schedule(**keys)
        most = max(rows for rows in range(1, 65) if fits(found, rows, TOP_K, EXPERTS, SLOTS))
        for _ in range(20):
            logits = 9 * torch.randn(most, EXPERTS, generator=generator)
            batch = Batch(resident=torch.rand(EXPERTS, generator=generator) < 0.5, slots=SLOTS)
            out = select(logits, found.plan(0, most), Router(TOP_K), batch, backend="reference")
            assert int(out.active.sum()) <= SLOTS
