"""Which forwards are steps of the policy, and how their rows are grouped."""

import pytest
import torch

from sglang_xshare.stage.step import read_step
from stage.fake import forward_batch


def test_decode_has_one_row_a_request():
    step = read_step(forward_batch("decode", rows=5), mask_padding=False)
    assert (step.phase, step.rows, step.batch.tokens_per_request) == ("decode", 5, 1)
    assert step.batch.valid is None


@pytest.mark.parametrize(("rows", "batch_size", "tokens"), [(24, 3, 8), (4, 4, 1), (64, 1, 64)])
def test_verify_groups_rows_by_request_though_it_extends(rows, batch_size, tokens):
    step = read_step(forward_batch("verify", rows, batch_size), mask_padding=False)
    assert (step.phase, step.rows, step.batch.tokens_per_request) == ("verify", rows, tokens)


def test_ragged_verify_is_no_batch_of_requests():
    line = "^target-verify of 25 rows for 3 requests: .*; allowed is the same number of draft tokens for each$"
    with pytest.raises(RuntimeError, match=line):
        read_step(forward_batch("verify", 25, 3), mask_padding=False)


def test_idle_verify_has_no_request_to_group_by():
    assert read_step(forward_batch("verify", 0, 0), mask_padding=False).batch.tokens_per_request == 1


@pytest.mark.parametrize("mode", ["prefill", "idle", "draft_extend", "split_prefill"])
def test_every_other_forward_is_no_step(mode):
    assert read_step(forward_batch(mode, rows=5), mask_padding=True) is None


def test_number_of_draft_tokens_is_read_at_every_step():
    """Adaptive speculation changes it at run time."""
    tokens = [
        read_step(forward_batch("verify", rows, 4), mask_padding=False).batch.tokens_per_request for rows in (16, 32, 8)
    ]
    assert tokens == [4, 8, 2]


def test_padding_rows_are_those_in_slot_0():
    step = read_step(forward_batch("decode", rows=8, padding=3), mask_padding=True)
    assert step.batch.valid.tolist() == [True] * 5 + [False] * 3


def test_mask_is_live():
    """A graph's input buffers change between replays: the mask must be an operation on them, not a copy of a value."""
    batch = forward_batch("decode", rows=4, padding=4)
    recorded = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            recorded.append((operation, args))
            return operation(*args, **(kwargs or {}))

    with Record():
        read_step(batch, mask_padding=True)
    assert [(operation, args[0] is batch.out_cache_loc) for operation, args in recorded] == [
        (torch.ops.aten.ne.Scalar, True)
    ]
