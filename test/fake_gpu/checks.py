"""What tests of servers on the GPU that is not there check of each, and which of them page experts."""

import pytest
import torch

from sglang_xshare import Batch, Router, build_plan, select
from sglang_xshare.patching.tree import find_tree
from sglang_xshare.upstream.release import is_since

PAGES = is_since(find_tree().release, "0.5.23")
SINCE_0_5_23 = pytest.mark.skipif(not PAGES, reason="served from 0.5.23 on")
NEEDS_PAGING = pytest.mark.skipif(not PAGES, reason="SGLang pages experts from 0.5.23 on")
TOP_K = 4
SUMS = ("layer_steps", "experts_before", "experts_after", "rows", "exact_rows", "kept_mass")
MAY_WAIT = {"attach", "report", "publish", "handle"}
"""Our calls that start, that read counters, now and then, or that switch between two steps."""
SELECT = {"choose", "prepare", "route"}
"""Those that copy a plan's numbers to the device, the first time that a layer has a size."""


def check(server, layers=None, sizes=3):
    """Nothing was forbidden; graphs of two rows or more select once in each layer, which had steps of so many sizes."""
    assert server.process.poll() is None
    assert server.find_violations() == []
    waits = server.find_waits()
    assert set(waits) <= MAY_WAIT | SELECT, waits
    assert layers is None or sum(waits[name] for name in SELECT) <= sizes * layers, waits
    if layers is not None:
        assert set(list_selecting(server)) - {0} == {layers} - {0}


def list_selecting(server):
    """How many layers each captured graph selects in, in ascending order."""
    return sorted(kernels["select_kernel"] for kernels in server.read_captures())


def count_steps(metas):
    """{(steps with the policy, all of them)} of requests' last messages."""
    return {(meta["expert_policy"]["steps"], meta["expert_policy"]["of"]) for meta in metas}


def expect(record, policy, keys):
    """The reference's answer to a record's logits."""
    valid, exact, depth = (record[name] and torch.tensor(record[name]) for name in ("valid", "exact", "depth"))
    batch = Batch(valid, record["tokens_per_request"], exact, depth=None if depth is None else depth.int())
    plan = build_plan(policy, **keys)
    return select(torch.tensor(record["logits"]), plan, Router(TOP_K), batch, backend="reference")


def check_records(records, policy, keys):
    """Every row has the reference's experts. Returns the sums that a server counts."""
    sums = dict.fromkeys(SUMS, 0)
    for record in records:
        wanted = expect(record, policy, keys)
        assert record["active"] == wanted.active.tolist()
        live = record["valid"] or [True] * len(record["logits"])
        for row in (row for row, is_live in enumerate(live) if is_live):
            pairs = zip(record["ids"][row], record["weights"][row], strict=True)
            found = {expert: weight for expert, weight in pairs if weight > 0}
            own = zip(wanted.topk_ids[row].tolist(), wanted.topk_weights[row].tolist(), strict=True)
            assert found == pytest.approx({expert: weight for expert, weight in own if expert >= 0}, rel=1e-4)
        sums["layer_steps"] += 1
        sums["experts_before"] += int(wanted.vanilla_active.sum())
        sums["experts_after"] += int(wanted.active.sum())
        sums["rows"] += sum(live)
        sums["exact_rows"] += sum(a and b for a, b in zip(live, record["exact"] or (), strict=False))
        sums["kept_mass"] += float(wanted.kept_mass.sum())
    return sums
