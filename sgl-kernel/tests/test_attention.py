"""Tests of paged attention through SGLang's operators. A softmax over single scores in float64 is the reference."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sgl_kernel  # noqa: F401  registers the operators

decode = torch.ops.sgl_kernel.decode_attention_cpu
extend = torch.ops.sgl_kernel.extend_attention_cpu
NO_VARIANT = (0.0, False, 0, None, None)  # logit cap, cross attention, sliding window, encoder lengths, sinks
SCALE = 0.3


@dataclass
class Batch:
    """Requests of `prefix + queries` tokens in a paged cache. Slots that belong to no request contain NaN."""

    prefix: list[int]
    queries: list[int]
    query: Tensor
    k_buffer: Tensor
    v_buffer: Tensor
    req_to_token: Tensor
    rows: Tensor

    @property
    def seq_lens(self) -> Tensor:
        return torch.tensor([p + q for p, q in zip(self.prefix, self.queries, strict=True)], dtype=torch.int64)

    @property
    def query_start(self) -> list[int]:
        return [sum(self.queries[:i]) for i in range(len(self.queries))]

    def extend(self, tree_mask: Tensor | None = None, causal: bool = True) -> Tensor:
        output = torch.full((*self.query.shape[:2], self.v_buffer.shape[-1]), math.nan, dtype=self.query.dtype)
        counts = torch.tensor(self.queries, dtype=torch.int32)
        starts = torch.tensor(self.query_start, dtype=torch.int32)
        table = (self.req_to_token, self.rows, self.seq_lens)
        extend(
            *(self.query, None, None, output, self.k_buffer, self.v_buffer, 1.0, 1.0, *table, counts, starts),
            *(max(self.queries, default=0), SCALE, *NO_VARIANT, tree_mask, causal),
        )
        return output

    def decode(
        self, k_scale: float = 1.0, v_scale: float = 1.0, stored: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> Tensor:
        output = torch.full((*self.query.shape[:2], self.v_buffer.shape[-1]), math.nan, dtype=self.query.dtype)
        key, value, loc = stored or (None, None, torch.empty(0, dtype=torch.int64))
        table = (self.req_to_token, self.rows, self.seq_lens)
        buffers = (self.k_buffer, self.v_buffer)
        decode(self.query, *buffers, k_scale, v_scale, output, key, value, loc, output, *table, SCALE, *NO_VARIANT)
        return output

    def expected(self, sees: Callable[[int, int, int], bool], scale: float = SCALE) -> Tensor:
        """Return the expected outputs, computed one score at a time.

        `sees(request, query, other query)` returns whether a new token attends to another new token.
        """
        heads, group = self.query.shape[1], self.query.shape[1] // self.k_buffer.shape[1]
        out = torch.zeros(*self.query.shape[:2], self.v_buffer.shape[-1], dtype=torch.float64)
        for i, (prefix, queries, start) in enumerate(zip(self.prefix, self.queries, self.query_start, strict=True)):
            slots = self.req_to_token[self.rows[i], : prefix + queries].tolist()
            for q in range(queries):
                visible = [s for p, s in enumerate(slots) if p < prefix or sees(i, q, p - prefix)]
                for h in range(heads):
                    query = self.query[start + q, h].double()
                    scores = [scale * float(query @ self.k_buffer[s, h // group].double()) for s in visible]
                    weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
                    values = [self.v_buffer[s, h // group].double() for s in visible]
                    out[start + q, h] = sum((w * v for w, v in zip(weights, values, strict=True)), out[start + q, h])
        return out


def make_batch(
    prefix: list[int],
    queries: list[int],
    heads: int = 4,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    value_size: int = 8,
    seed: int = 0,
) -> Batch:
    torch.manual_seed(seed)
    lengths = [p + q for p, q in zip(prefix, queries, strict=True)]
    slots = torch.randperm(sum(lengths) + 5) + 1
    k_buffer = torch.full((slots.numel() + 1, kv_heads, 8), math.nan)
    v_buffer = torch.full((slots.numel() + 1, kv_heads, value_size), math.nan)
    req_to_token = torch.zeros(len(lengths) + 3, max(lengths, default=0) + 4, dtype=torch.int32)
    rows = torch.randperm(len(lengths) + 3)[: len(lengths)]
    for row, length in zip(rows.tolist(), lengths, strict=True):
        own, slots = slots[:length], slots[length:]
        req_to_token[row, :length] = own.int()
        k_buffer[own] = torch.randn(length, kv_heads, 8)
        v_buffer[own] = torch.randn(length, kv_heads, value_size)
    query = torch.randn(sum(queries), heads, 8).to(dtype)
    return Batch(prefix, queries, query, k_buffer.to(dtype), v_buffer.to(dtype), req_to_token, rows)


def causal(request: int, query: int, other: int) -> bool:
    return other <= query


def assert_close(got: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if got.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


lengths = st.lists(st.integers(0, 20), max_size=5)


few = settings(max_examples=25, deadline=None, derandomize=True)


@few
@given(lengths, st.sampled_from([(4, 4), (4, 2), (6, 1)]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_decode_attends_to_the_whole_sequence(prefix: list[int], heads: tuple[int, int], dtype: torch.dtype) -> None:
    """The size of values may differ from the size of keys."""
    batch = make_batch(prefix, [1] * len(prefix), *heads, dtype=dtype, value_size=8 if len(prefix) % 2 else 5)
    assert_close(batch.decode(), batch.expected(causal))


@few
@given(lengths, st.booleans(), st.data())
def test_extend_is_causal_among_new_tokens(prefix: list[int], is_causal: bool, data: st.DataObject) -> None:
    """Without causality all new tokens attend to each other."""
    queries = [data.draw(st.sampled_from([0, 1, 3, 4])) for _ in prefix]
    batch = make_batch(prefix, queries)
    sees = causal if is_causal else lambda request, query, other: True
    assert_close(batch.extend(causal=is_causal), batch.expected(sees))


@few
@given(lengths.filter(bool), st.integers(1, 5), st.integers(0, 999), st.booleans())
def test_tree_mask_decides_among_new_tokens(prefix: list[int], nodes: int, seed: int, full: bool) -> None:
    rng = random.Random(seed)
    batch = make_batch(prefix, [nodes] * len(prefix))
    trees = [[[q == o or rng.random() < 0.5 for o in range(nodes)] for q in range(nodes)] for _ in prefix]
    cells = [
        cell
        for request, tree in enumerate(trees)
        for row in tree
        for cell in ([True] * prefix[request] if full else []) + row
    ]
    got = batch.extend(tree_mask=torch.tensor(cells))
    assert_close(got, batch.expected(lambda request, query, other: trees[request][query][other]))


def test_a_verify_row_equals_the_decode_step_it_stands_for() -> None:
    """Speculation must not change the output, so a token must have the same output in every batch."""
    batch = make_batch([30, 7, 16], [4, 4, 4])
    verified = batch.extend()
    for q in range(4):
        rows = torch.tensor(batch.query_start) + q
        step = Batch(
            [p + q for p in batch.prefix],
            [1, 1, 1],
            batch.query[rows],
            batch.k_buffer,
            batch.v_buffer,
            batch.req_to_token,
            batch.rows,
        )
        torch.testing.assert_close(step.decode(), verified[rows], atol=1e-6, rtol=1e-6)


def test_quantized_cache_is_scaled() -> None:
    batch = make_batch([3, 9], [1, 1])
    expected = 0.5 * batch.expected(causal, scale=2.0 * SCALE)
    assert_close(batch.decode(k_scale=2.0, v_scale=0.5), expected)


def test_decode_stores_the_steps_keys_and_values() -> None:
    batch = make_batch([3, 9], [1, 1])
    loc = torch.stack([batch.req_to_token[row, p] for row, p in zip(batch.rows, batch.prefix, strict=True)]).long()
    key, value = batch.k_buffer[loc].clone(), batch.v_buffer[loc].clone()
    expected = batch.expected(causal)
    batch.k_buffer[loc] = batch.v_buffer[loc] = math.nan
    assert_close(batch.decode(stored=(key.flatten(1), value.flatten(1), loc)), expected)
    assert torch.equal(batch.k_buffer[loc], key)
    assert torch.equal(batch.v_buffer[loc], value)


def test_a_request_without_tokens_gets_zeros() -> None:
    batch = make_batch([0, 5], [1, 1])
    output = torch.full_like(batch.query, math.nan)
    seq_lens = torch.tensor([0, 6])
    buffers, table = (batch.k_buffer, batch.v_buffer), (batch.req_to_token, batch.rows, seq_lens)
    decode(batch.query, *buffers, 1.0, 1.0, output, None, None, batch.rows, output, *table, SCALE, *NO_VARIANT)
    assert not output[0].any()
    assert_close(output[1:], batch.expected(causal)[1:])


def test_sglang_0_5_17_calls_without_scales() -> None:
    batch = make_batch([3, 9], [2, 2])
    output = torch.empty_like(batch.query)
    table = (batch.req_to_token, batch.rows, batch.seq_lens)
    counts, starts = torch.tensor([2, 2]), torch.tensor([0, 2])
    buffers = (batch.k_buffer, batch.v_buffer)
    extend(batch.query, None, None, output, *buffers, *table, counts, starts, 2, SCALE, *NO_VARIANT, None)
    assert torch.equal(output, batch.extend())

    batch = make_batch([3, 9], [1, 1])
    output = torch.empty_like(batch.query)
    table, buffers = (batch.req_to_token, batch.rows, batch.seq_lens), (batch.k_buffer, batch.v_buffer)
    decode(batch.query, *buffers, output, None, None, batch.rows, output, *table, SCALE, *NO_VARIANT)
    assert torch.equal(output, batch.decode())


@pytest.mark.parametrize(
    ("variant", "feature"),
    [
        ((30.0, False, 0, None, None), "a logit cap"),
        ((0.0, True, 0, None, None), "cross attention"),
        ((0.0, False, 128, None, None), "a sliding window"),
        ((0.0, False, 0, None, torch.zeros(4)), "attention sinks"),
    ],
)
def test_an_unsupported_variant_is_refused_by_name(variant: tuple, feature: str) -> None:
    batch = make_batch([3], [1])
    table = (batch.req_to_token, batch.rows, batch.seq_lens)
    one, zero = torch.tensor([1]), torch.tensor([0])
    buffers = (batch.k_buffer, batch.v_buffer)
    with pytest.raises(NotImplementedError, match=f"{feature} is not supported"):
        decode(batch.query, *buffers, 1.0, 1.0, batch.query, None, None, zero, batch.query, *table, SCALE, *variant)
    with pytest.raises(NotImplementedError, match=f"{feature} is not supported"):
        extend(
            *(batch.query, None, None, batch.query, *buffers, 1.0, 1.0, *table, one, zero, 1, SCALE, *variant),
            *(None, True),
        )


def test_a_compressed_cache_is_refused_by_name() -> None:
    batch = make_batch([3], [1])
    batch.k_buffer = torch.zeros(9, 1, 16)
    with pytest.raises(NotImplementedError, match="multi-head latent attention"):
        batch.decode()


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    batch = make_batch([3, 9], [2, 2])
    with pytest.raises(ValueError, match=r"4 queries; must be 2, one for each request"):
        batch.decode()
    with pytest.raises(
        ValueError, match=r"tree mask of 9 cells; must have 8 \(queries x queries\) or 32 \(queries x seq"
    ):
        batch.extend(tree_mask=torch.ones(9, dtype=torch.bool))
    batch.prefix = [-1, 9]
    with pytest.raises(ValueError, match="request 0 has 2 queries; must be at most its 1 tokens"):
        batch.extend()
