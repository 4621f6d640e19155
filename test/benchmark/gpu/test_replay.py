"""The stage in captured decode and verify graphs, padded as upstream's decode runner pads, by whole requests: padding
rows are inert at every size, with and without expert parallelism.

On a GPU the graphs are real. Elsewhere a replay runs the captured call again on the same buffers, which shows all but
what only a capture can: that nothing allocates, synchronizes or keeps a value of its first run.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from sglang_xshare import Batch, Router, build_plan, select
from sglang_xshare.stage.placement import Placement
from sglang_xshare.stage.record.counters import AFTER, BEFORE, KEPT, ROWS, STEPS
from sglang_xshare.upstream.batches import Batches
from stage.fake import EXPERTS, TOP_K, Model, forward_batch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UPSTREAM_SIZES = (1, 2, 4, 8, 12, 16)
LARGEST = 16
PHYSICAL = torch.arange(EXPERTS).expand(len(Model().configs), -1).to(DEVICE)
"""Each layer's experts, where they stand."""


class DecodeRunner:
    """Static buffers, a graph a captured size of requests, padding: `tokens` rows each, one in decode (None)."""

    def __init__(self, model: Model, stage, sizes: Sequence[int], tokens: int | None) -> None:
        self.model = model
        self.stage = stage
        self.sizes = sizes
        self.phase = "verify" if tokens else "decode"
        self.tokens = tokens or 1
        generator = torch.Generator().manual_seed(1)
        # Stale, but plausible: what earlier, larger batches left in the buffers.
        self.logits = torch.randn(LARGEST * self.tokens, EXPERTS, generator=generator).to(DEVICE)
        self.slots = torch.zeros(LARGEST * self.tokens, dtype=torch.int64, device=DEVICE)
        self.graphs = {size: self._capture(size) for size in reversed(sizes)}

    def replay(self, logits: torch.Tensor) -> torch.Tensor:
        """Run `logits` [live rows, experts]. Returns what the stage counted, [layers, 6]."""
        live = len(logits)
        size = self.sizes[bisect_left(self.sizes, live // self.tokens)]
        self.logits[:live] = logits
        self.slots.zero_()
        self.slots[:live] = torch.arange(7, 7 + live)
        before = self.stage.acting.counters.totals.clone()
        self.graphs[size]()
        return (self.stage.acting.counters.totals - before).cpu()

    def _capture(self, size: int) -> Callable[[], None]:
        rows = size * self.tokens
        batch = forward_batch(self.phase, rows, batch_size=size)
        batch.input_ids = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
        batch.out_cache_loc = self.slots[:rows]

        def run() -> None:
            self.model.logits = self.logits[:rows]
            self.model.forward(None, None, batch)

        run()
        if DEVICE == "cpu":
            return run
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay


@pytest.fixture
def make_runner(attach) -> Callable[..., DecodeRunner]:
    """Call it with captured sizes and server flags; with the draft tokens of a request for verify."""

    def make(sizes: Sequence[int], tokens: int | None = None, placement=None, **flags) -> DecodeRunner:
        model = Model()
        batches = Batches(tuple(size * (tokens or 1) for size in sizes), tokens or 1)
        stage = attach(model, batches, device=DEVICE, speculative_algorithm="EAGLE3" if tokens else None, **flags)
        stage.reads_padding = True  # as on every GPU
        for layer in stage.layers:
            layer.placement = placement
        return DecodeRunner(model, stage, sizes, tokens)

    return make


def draw(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, EXPERTS, generator=torch.Generator().manual_seed(seed))


def flags(keys: dict[str, int]) -> dict[str, Any]:
    """Server flags of the policy with these keys."""
    return {"expert_policy": "xshare", "expert_policy_config": keys}


PER_REQUEST, PER_BATCH = {"k0": 1, "add_per_request": 2, "add": 0}, {"k0": 1, "add": 4}
PER_RANK = {"k0": 1, "target_per_rank": 3}
RANKS = [expert // (EXPERTS // 4) for expert in range(EXPERTS)]


@pytest.mark.parametrize("sizes", [UPSTREAM_SIZES, range(1, LARGEST + 1)], ids=["upstream's sizes", "every size"])
@pytest.mark.parametrize("requests", [1, 3, 5, 9, 13, 16])
@pytest.mark.parametrize(
    ("tokens", "keys", "ranks"),
    [
        *((None, PER_BATCH, None), (4, PER_BATCH, None), (4, PER_REQUEST, None)),
        *((None, PER_BATCH, RANKS), (4, PER_RANK, RANKS), (None, PER_RANK, RANKS)),
    ],
)
def test_a_replay_counts_exactly_its_live_rows(make_runner, sizes, requests, tokens, keys, ranks):
    """One step of every layer: the live rows' selection, as the reference has it, and no other row."""
    rows = max(2, requests * (tokens or 1))  # a single row has no policy
    logits, plan = draw(rows, requests), build_plan("xshare", **keys)
    placement = ranks and Placement(max(ranks) + 1, ranks.count(0), PHYSICAL)
    counts = make_runner(sizes, tokens, placement, **flags(keys)).replay(logits.to(DEVICE))
    batch = Batch(tokens_per_request=tokens or 1)
    expected = select(logits, plan, Router(TOP_K), batch, ranks, backend="reference")
    counted = [1, len(logits), int(expected.vanilla_active.sum()), int(expected.active.sum())]
    for layer in counts:
        assert layer[[STEPS, ROWS, BEFORE, AFTER]].tolist() == counted
        torch.testing.assert_close(layer[KEPT], expected.kept_mass.sum(dtype=torch.float64), rtol=1e-5, atol=1e-5)


def test_masking_alone_makes_padding_inert(make_runner):
    counts = make_runner(UPSTREAM_SIZES, mask_padding_experts=True).replay(draw(9).to(DEVICE))
    active = select(draw(9), build_plan("vanilla"), Router(TOP_K), Batch(), backend="reference").active.sum()
    assert counts[:, [BEFORE, AFTER]].tolist() == [[active, active]] * len(counts)


def test_a_replay_follows_its_inputs(make_runner):
    """One graph, many batches: it keeps neither the logits nor the number of rows of its capture."""
    runner = make_runner((8,), **flags(PER_BATCH))
    for live, seed in ((8, 0), (3, 1), (7, 2), (7, 3)):
        logits = draw(live, seed)
        expected = select(logits, build_plan("xshare", **PER_BATCH), Router(TOP_K), Batch(), backend="reference")
        assert runner.replay(logits.to(DEVICE))[0, AFTER] == expected.active.sum()
    assert runner.replay(torch.empty(0, EXPERTS, device=DEVICE)).abs().sum() == 0
