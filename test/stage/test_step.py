"""Which forwards are steps of the policy, and how their rows are grouped."""

import re
from dataclasses import MISSING, fields
from importlib import import_module

import pytest
import torch
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from sglang.srt.speculative.uno_info import UnoForwardInput

from sglang_xshare.stage.exact import Exact
from sglang_xshare.stage.step import Step, read_step
from sglang_xshare.upstream.ranks import gather_rows
from stage.fake import Gather, forward_batch, gathered_batches


@pytest.mark.parametrize(("rows", "batch_size", "tokens"), [(24, 3, 8), (4, 4, 1), (64, 1, 64), (0, 0, 1)])
def test_verify_groups_rows_by_request_though_it_extends(rows, batch_size, tokens):
    step = read_step(forward_batch("verify", rows, batch_size), mask_padding=False)
    assert (step.phase, step.rows, step.batch.tokens_per_request) == ("verify", rows, tokens)


def test_ragged_verify_is_no_batch_of_requests():
    line = "^target-verify of 25 rows for 3 requests:"
    with pytest.raises(RuntimeError, match=line):
        read_step(forward_batch("verify", 25, 3), mask_padding=False)


@pytest.mark.parametrize("mode", ["prefill", "idle", "draft_extend", "split_prefill"])
def test_every_other_forward_is_no_step(mode):
    assert read_step(forward_batch(mode, rows=5), mask_padding=True) is None


@pytest.mark.parametrize(("kind", "is_step"), [("UNO_DRAFT", False), ("UNO_VERIFY", True)])
def test_a_draft_through_the_targets_own_layers_is_no_step(kind, is_step):
    """UNO's: both forwards have upstream's class of input, one width, and the mode of verification."""
    batch = place_drafts(forward_batch("verify", 8, 2), [7, 8, 9, 10, 3, 4, 5, 6])
    batch.spec_info = UnoForwardInput(SpecInputType[kind], batch.positions, draft_token_num=4)
    step = read_step(batch, mask_padding=True, by_depth=True)
    assert (step is not None) == is_step
    if is_step:
        assert (step.rows, step.batch.tokens_per_request, step.batch.depth.tolist()) == (8, 4, [0, 1, 2, 3] * 2)


@pytest.mark.parametrize("module", ["dflash_info.DFlashVerifyInput", "frozen_kv_mtp_info.FrozenKVMTPVerifyInput"])
def test_what_upstream_verifies_is_a_step(module):
    """Of DFLASH and DSPARK, and of FROZEN_KV_MTP: no draft's input, one width a request."""
    name, kind = module.split(".")
    found = getattr(import_module(f"sglang.srt.speculative.{name}"), kind)
    assert issubclass(found, SpecInput)
    given = {field.name: None for field in fields(found) if field.default is MISSING}
    spec = found(**given | {"draft_token_num": 4, "topk": 1} | ({"spec_steps": 3} if "spec_steps" in given else {}))
    batch = forward_batch("verify", 8, 2)
    batch.spec_info = spec
    assert spec.is_verify_input()
    assert read_step(batch, mask_padding=True).batch.tokens_per_request == 4


def test_padding_rows_are_those_in_slot_0():
    """A step without drafts has no depth."""
    step = read_step(forward_batch("decode", rows=8, padding=3), mask_padding=True, by_depth=True)
    assert step.batch.valid.tolist() == [True] * 5 + [False] * 3
    assert step.batch.depth is None


def place_drafts(batch, positions):
    batch.positions = torch.tensor(positions)
    return batch


def test_a_verify_step_says_how_deep_drafts_are():
    """Requests of 4 rows: a chain after 7 tokens, a tree after 100, and padding."""
    batch = place_drafts(forward_batch("verify", 12, 3, padding=4), [7, 8, 9, 10, 100, 101, 101, 102, 9, 3, 4, 10])
    batch.out_cache_loc[:8] += 1
    step = read_step(batch, mask_padding=True, by_depth=True)
    assert step.batch.depth.tolist() == [0, 1, 2, 3, 0, 1, 1, 2, 0, 0, 0, 1]
    assert (step.batch.depth.dtype, step.batch.valid.tolist()) == (torch.int32, [True] * 8 + [False] * 4)
    assert read_step(batch, mask_padding=True).batch.depth is None


def test_ranks_of_data_parallel_attention_tell_each_other_how_deep_their_drafts_are(monkeypatch):
    """And which rows are exact, in one number a row."""
    batches = gathered_batches("verify", [2, 1], draft_tokens=3)
    place_drafts(batches[0], [5, 6, 7, 9, 10, 10])
    place_drafts(batches[1], [3, 4, 4, 0, 0, 0])
    told: list[torch.Tensor] = []

    def gather(states, rows, batch):
        told.append(states.float())  # as a CPU's collectives exchange them
        return torch.cat(told)

    monkeypatch.setattr("sglang_xshare.stage.step.gather_rows", gather)
    exact = Exact("cpu")
    exact._flags[:3] = True  # the first request of each rank
    read_step(batches[0], mask_padding=True, exact=exact, by_depth=True)
    step = read_step(batches[1], mask_padding=True, exact=exact, by_depth=True)
    assert step.batch.depth.tolist() == [0, 1, 2, 0, 1, 1, 0, 1, 1, 0, 0, 0]
    assert step.batch.valid.tolist() == [True] * 9 + [False] * 3
    assert step.batch.exact.tolist() == [True, True, True, False, False, False] * 2


class Record(torch.utils._python_dispatch.TorchDispatchMode):
    """What is computed, and of which first operand."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[object, object]] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.operations.append((operation, args[0]))
        return operation(*args, **(kwargs or {}))


def test_mask_is_live():
    """A graph's input buffers change between replays: the mask must be an operation on them, not a copy of a value."""
    batch = forward_batch("decode", rows=4, padding=4)
    with Record() as recorded:
        read_step(batch, mask_padding=True)
    ((operation, operand),) = recorded.operations
    assert operation is torch.ops.aten.ne.Scalar
    assert operand is batch.out_cache_loc


def test_gathered_mask_is_live(monkeypatch):
    batches = gathered_batches("decode", [2, 1])
    gathered = []
    monkeypatch.setattr(
        "sglang_xshare.stage.step.gather_rows", lambda flags, rows, batch: gathered.append(flags) or torch.ones(rows)
    )
    for batch in batches:
        with Record() as recorded:
            read_step(batch, mask_padding=False)
        operation, operand = recorded.operations[0]
        assert operation is torch.ops.aten.ne.Scalar
        assert operand is batch.out_cache_loc
        assert gathered.pop().equal(batch.out_cache_loc != 0)


def test_flags_are_gathered_as_upstream_gathers_rows(monkeypatch):
    dp_attention = pytest.importorskip("sglang.srt.layers.dp_attention", reason="needs an installed SGLang")

    def place(rows: torch.Tensor, own: torch.Tensor, batch: object) -> None:
        assert (batch, rows.shape, own.shape, own.dtype) == ("batch", (5, 1), (3, 1), rows.dtype)
        assert own.is_contiguous()
        assert rows.is_contiguous()
        rows[:2] = 0
        rows[2:] = own
        own.zero_()  # as upstream does on a rank whose rows another one has too

    monkeypatch.setattr(dp_attention, "dp_gather_replicate", place)
    flags = torch.tensor([True, False, True])
    assert gather_rows(flags, 5, "batch").tolist() == [False, False, True, False, True]
    assert flags.tolist() == [True, False, True]


@pytest.fixture
def read_steps(monkeypatch):
    """Call it with the forward batches of attention-DP ranks for what each rank reads."""

    def read(batches) -> list[Step | None]:
        monkeypatch.setattr("sglang_xshare.stage.step.gather_rows", Gather(batches))
        return [read_step(batch, mask_padding=False) for batch in batches]

    return read


RANKS = {
    "longest": ([3, 1], True, [1, 1, 1, 1, 0, 0]),
    "sum": ([3, 1], False, [1, 1, 1, 1]),
    "one idle, longest": ([2, 0], True, [1, 1, 0, 0]),
    "three idle, sum": ([0, 0, 2, 0], False, [1, 1]),
}


@pytest.mark.parametrize("draft_tokens", [None, 4])
@pytest.mark.parametrize("case", RANKS)
def test_every_attention_dp_rank_reads_the_same_step(case, draft_tokens, read_steps):
    """Also one without requests, whose own mode tells nothing of the others'."""
    requests, longest, live = RANKS[case]
    mode, tokens = ("decode", 1) if draft_tokens is None else ("verify", draft_tokens)
    steps = read_steps(gathered_batches(mode, requests, draft_tokens, longest))
    for step in steps:
        assert (step.phase, step.rows, step.batch.tokens_per_request) == (mode, tokens * len(live), tokens)
        assert step.batch.valid.tolist() == [bool(flag) for flag in live for _ in range(tokens)]


@pytest.mark.parametrize(
    ("mode", "others"),
    [("decode", "prefill"), ("prefill", "idle"), ("prefill", "decode"), ("draft_extend", "draft_extend")],
)
def test_no_attention_dp_rank_selects_while_one_prefills(mode, others, read_steps):
    assert read_steps(gathered_batches(mode, [3, 0], others=others)) == [None, None]


@pytest.mark.parametrize("rows", [[8, 8], [4, 5]], ids=str)
def test_a_rank_whose_rows_split_a_request_is_no_batch_of_requests(rows, read_steps):
    """As where SGLang pads its rows to a multiple of its tensor-parallel ranks, which is refused at start-up."""
    batches = gathered_batches("verify", [2, 1], 3)
    for batch in batches:
        batch.global_num_tokens_cpu = rows
    with pytest.raises(RuntimeError, match=rf"^target-verify of {re.escape(str(rows))} rows on the ranks of"):
        read_steps(batches)


def test_a_gather_over_one_rank_is_none():
    """As SGLang pads rows for --moe-dense-tp-size without data-parallel attention."""
    batch = forward_batch("decode", rows=4)
    batch.global_num_tokens_cpu = [4]
    step = read_step(batch, mask_padding=False)
    assert (step.rows, step.batch.valid) == (4, None)
