"""Tests that compare linear attention with loops over single tokens, channels and heads in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sgl_kernel  # noqa: F401  registers the operators
from sgl_kernel.mamba import causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu

HEADS, VALUE_HEADS, KEY, VALUE = 2, 4, 3, 5
CHANNELS, WIDTH = 6, 4
requests = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(math.prod(shape)))


def lay_out(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Return the first token and the slot of each request. The second of several requests has no slot."""
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    slots = torch.arange(len(lengths), 0, -1, dtype=torch.int32)
    if len(lengths) > 1:
        slots[1] = -1
    return starts, slots


@settings(max_examples=20, deadline=None, derandomize=True)
@given(lengths=requests, has_bias=st.booleans())
def test_a_convolution_goes_on_after_its_state(lengths: list[int], has_bias: bool) -> None:
    starts, slots = lay_out(lengths)
    x, weight = draw(CHANNELS, sum(lengths)), draw(CHANNELS, WIDTH)
    bias = draw(CHANNELS) if has_bias else None
    states = draw(len(lengths) + 1, CHANNELS, WIDTH - 1)
    fresh = torch.tensor([number % 3 == 2 for number in range(len(lengths))])
    after = states.clone()
    out = causal_conv1d_fn_cpu(
        x,
        weight,
        bias,
        activation="silu",
        conv_states=after,
        has_initial_state=~fresh,
        cache_indices=slots,
        query_start_loc=starts,
        seq_lens_cpu=lengths,
    )
    expected = states.clone()
    for number, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        for channel in range(CHANNELS):
            before = [0.0] * (WIDTH - 1) if fresh[number] else states[slot, channel].tolist()
            inputs = before + x[channel, starts[number] : starts[number + 1]].tolist()
            for token in range(lengths[number]):
                window = zip(inputs[token : token + WIDTH], weight[channel].tolist(), strict=True)
                total = sum(a * b for a, b in window) + (float(bias[channel]) if bias is not None else 0.0)
                assert float(out[channel, starts[number] + token]) == pytest.approx(
                    total / (1 + math.exp(-total)), abs=1e-5
                )
            expected[slot, channel] = torch.tensor(inputs[1 - WIDTH :])
    assert torch.equal(after, expected)


def test_a_decode_step_convolves_as_a_prefill_of_one_token() -> None:
    starts, slots = lay_out([1, 1, 1])
    x, weight, states = draw(3, CHANNELS), draw(CHANNELS, WIDTH), draw(4, CHANNELS, WIDTH - 1)
    one, other = states.clone(), states.clone()
    out = causal_conv1d_update_cpu(x, one, weight, None, "silu", conv_state_indices=slots)
    expected = causal_conv1d_fn_cpu(
        x.T,
        weight,
        None,
        activation="silu",
        conv_states=other,
        has_initial_state=None,
        cache_indices=slots,
        query_start_loc=starts,
    )
    assert torch.equal(out, expected.T)
    assert torch.equal(one, other)
    assert not out[1].any()


def test_what_is_not_computed_is_refused() -> None:
    x, weight, slots = draw(2, CHANNELS), draw(CHANNELS, WIDTH), torch.tensor([0, 1])
    with pytest.raises(NotImplementedError, match="'gelu'"):
        causal_conv1d_update_cpu(x, draw(2, CHANNELS, WIDTH - 1), weight, None, "gelu", conv_state_indices=slots)
    with pytest.raises(NotImplementedError, match="draft"):
        causal_conv1d_update_cpu(x[None], draw(2, CHANNELS, WIDTH - 1), weight, conv_state_indices=slots)
    heads = draw(VALUE_HEADS)
    q, v = draw(1, 1, HEADS, KEY), draw(1, 1, VALUE_HEADS, VALUE)
    gates = heads[None], heads[None], draw(2, VALUE_HEADS, VALUE, KEY)
    with pytest.raises(NotImplementedError, match="softplus must have beta 1"):
        torch.ops.sgl_kernel.fused_sigmoid_gating_delta_rule_update_cpu(
            heads, heads, q, q, v, *gates, slots[:1], torch.tensor([0, 1]), True, 2.0
        )


@settings(max_examples=20, deadline=None, derandomize=True)
@given(lengths=requests)
def test_the_delta_rule_goes_on_after_its_state(lengths: list[int]) -> None:
    starts, slots = lay_out(lengths)
    tokens = sum(lengths)
    q, k, v = draw(1, tokens, HEADS, KEY), draw(1, tokens, HEADS, KEY) + 1, draw(1, tokens, VALUE_HEADS, VALUE)
    a, b, a_log, dt_bias = draw(tokens, VALUE_HEADS), draw(tokens, VALUE_HEADS), draw(VALUE_HEADS), draw(VALUE_HEADS)
    states = draw(len(lengths) + 1, VALUE_HEADS, VALUE, KEY)
    decay, rate = torch.ops.sgl_kernel.fused_gdn_gating_cpu(a_log, a, b, dt_bias)
    after, decoded = states.clone(), states.clone()
    out, _, _ = chunk_gated_delta_rule_cpu(
        q, k, v, decay, rate, initial_state=after, initial_state_indices=slots, cu_seqlens=starts
    )
    again = torch.ops.sgl_kernel.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=a_log,
        dt_bias=dt_bias,
        q=q,
        k=k,
        v=v,
        a=a,
        b=b,
        initial_state_source=decoded,
        initial_state_indices=slots,
        cu_seqlens=starts,
        use_qk_l2norm_in_kernel=True,
    )
    assert torch.equal(out, again)
    assert torch.equal(after, decoded)
    expected = states.double()
    for number, slot in enumerate(slots.tolist()):
        for head in range(VALUE_HEADS):
            state = expected[slot, head]
            for token in range(int(starts[number]), int(starts[number + 1])):
                if slot < 0:
                    assert not out[0, token].any()
                    continue
                query, key = (x[0, token, head * HEADS // VALUE_HEADS].double() for x in (q, k))
                query, key = query / math.hypot(*query.tolist()) / math.sqrt(KEY), key / math.hypot(*key.tolist())
                state *= math.exp(-math.exp(a_log[head]) * math.log1p(math.exp(a[token, head] + dt_bias[head])))
                learns = 1 / (1 + math.exp(-b[token, head]))
                state += learns * torch.outer(v[0, token, head].double() - state @ key, key)
                torch.testing.assert_close(out[0, token, head].double(), state @ query, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(after.double(), expected, atol=1e-4, rtol=1e-4)
