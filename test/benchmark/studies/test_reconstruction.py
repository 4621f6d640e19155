"""The oracle's arithmetic against outputs computed the plain way, and denied experts against the model itself."""

import itertools

import pytest
import torch

from benchmark.quality.measure import Bench
from benchmark.quality.model import Layout
from benchmark.quality.text import load_sequences
from benchmark.studies.masking import Masked, blocks, confidence, deny_rank
from benchmark.studies.moe_spec import budget_at
from benchmark.studies.reconstruction import errors_along, gram_of, greedy_order
from sglang_xshare import build_plan

STEPS, ROWS, TOP_K = 3, 5, 4


@pytest.fixture
def block(model):
    return blocks(model)[0]


@pytest.fixture
def masked(checkpoint, model):
    return Masked(model, load_sequences(checkpoint / "heldout", checkpoint, length=25, per_domain=2), prompt=16)


def make_inputs(block):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(STEPS, ROWS, block.gate.weight.shape[1], generator=draw)
    return hidden, hidden @ block.gate.weight.detach().T


@torch.inference_mode()
def outputs_without(block, hidden, logits, missing):
    """[rows, hidden] of one step: every row's own top-k but the missing ones, weights as they were."""
    weights, ids = logits.softmax(-1).topk(TOP_K)
    weights = weights / weights.sum(-1, keepdim=True)
    return block.experts(hidden, ids, weights.masked_fill(torch.isin(ids, torch.tensor(sorted(missing))), 0.0))


def test_the_gram_matrix_has_the_error_of_any_missing_set(block):
    hidden, logits = make_inputs(block)
    gram = gram_of(block, hidden, logits, TOP_K)
    for step, missing in itertools.product(range(STEPS), ([0, 3, 9], [5], range(16), [])):
        missing = list(missing)
        lost = outputs_without(block, hidden[step], logits[step], []) - outputs_without(
            block, hidden[step], logits[step], missing
        )
        found = gram[step][missing][:, missing].sum()
        torch.testing.assert_close(found, lost.square().sum(), rtol=1e-4, atol=1e-4)


def test_the_oracle_adds_what_leaves_the_smallest_error(block):
    gram = gram_of(block, *make_inputs(block), TOP_K)
    order = greedy_order(gram)
    for step in range(STEPS):
        kept: list[int] = []
        for expert in order[step].tolist():
            rest = [other for other in range(16) if other not in kept]
            left = {other: sum_over(gram[step], [one for one in rest if one != other]) for other in rest}
            assert left[expert] <= min(left.values()) + 1e-4
            kept.append(expert)
        assert sorted(kept) == list(range(16))


def sum_over(gram, experts):
    return gram[experts][:, experts].sum().item()


def test_errors_fall_from_one_to_nothing_along_an_order(block):
    gram = gram_of(block, *make_inputs(block), TOP_K)
    order = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(step)) for step in range(STEPS)])
    errors = errors_along(gram, order)
    assert errors[0] == 1
    assert errors[-1] == 0
    for budget in (3, 11):
        expected = [
            sum_over(gram[step], order[step, budget:].tolist()) / sum_over(gram[step], list(range(16)))
            for step in range(STEPS)
        ]
        assert errors[budget].item() == pytest.approx(sum(expected) / STEPS, rel=1e-4)


def test_a_budget_lies_on_the_line_between_two():
    assert budget_at([1.0, 0.5, 0.1], 0.5) == 1
    assert budget_at([1.0, 0.5, 0.1], 0.3) == pytest.approx(1.5)
    assert budget_at([1.0, 0.5, 0.1], 0.0) == 2


def test_a_denied_choice_gives_way_to_the_next():
    logits = torch.tensor([[1.0, 4.0, 3.0, 2.0], [9.0, 1.0, 2.0, 3.0]])
    assert deny_rank(0, logits).topk(2).indices.tolist() == [[2, 3], [3, 2]]
    assert deny_rank(1, logits).topk(2).indices.tolist() == [[1, 3], [0, 2]]
    assert confidence(torch.tensor([[0.0, 0.0], [50.0, 0.0]])).tolist() == [0.5, 1.0]


def test_masks_are_what_a_policy_of_the_same_experts_is(masked):
    """Nothing denied is vanilla; all but the first choice denied is `pruned` with k0 = 1."""
    bench = Bench(masked.model, masked.sequences, masked.prompt)
    vanilla = bench.run(build_plan("vanilla"), Layout(4)).nats
    torch.testing.assert_close(masked.run(), vanilla, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(masked.run(lambda layer, hidden, logits: logits), vanilla, rtol=1e-4, atol=1e-4)

    def first_alone(layer, hidden, logits):
        return logits.masked_fill(logits < logits.amax(1, keepdim=True), -torch.inf)

    pruned = bench.run(build_plan("pruned", k0=1), Layout(4)).nats
    torch.testing.assert_close(masked.run(first_alone), pruned, rtol=1e-4, atol=1e-4)


def test_a_mask_of_the_prompt_changes_what_follows_and_one_sees_every_layer(masked):
    seen = []

    def mask(layer, hidden, logits):
        seen.append((layer, len(hidden), len(logits)))
        return deny_rank(0, logits)

    in_prefill = masked.run(prompt=mask)
    assert seen == [(0, 4 * 16, 4 * 16), (1, 4 * 16, 4 * 16)]
    vanilla = masked.run()
    assert not torch.allclose(in_prefill, vanilla)
    assert torch.equal(masked.run(), vanilla), "the hooks are gone, and the cache is as it was"
