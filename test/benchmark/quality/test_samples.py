"""`python -m benchmark.quality.samples`: answers drawn under a policy, what they are worth, and with which error."""

import pytest
import torch

from benchmark.quality import samples
from benchmark.quality.model import Layout, prefill
from benchmark.quality.samples import Outcome, compare, group_problems
from sglang_xshare import build_plan

TOLD = [(f"Q: {a}+1 A: {a + 1}\nQ: {b}+1 A:", f" {b + 1}\n") for a in (1, 2, 11) for b in (3, 4, 14)]


def test_drawn_tokens_are_decoded_as_given_ones(model):
    """Where every draw is the text's own token, logits and experts are those of a decode of that text."""
    tokens = torch.randint(300, (8, 14), generator=torch.Generator().manual_seed(0))
    plan, layout, seen = build_plan("xshare", k0=1, add=2), Layout(4), []

    def draw(logits):
        seen.append(logits)
        return tokens[:, 9 + len(seen)]

    with torch.inference_mode():
        prefilled = prefill(model, tokens[:, :6])
        expected, routing = prefilled.decode(tokens[:, 6:13], plan, layout)
        drawn, found = prefilled.sample(tokens[:, 6:10], plan, layout, draw, count=4)
        vanilla, _ = prefilled.decode(tokens[:, 6:13], build_plan("vanilla"), layout)
        again, _ = prefilled.decode(tokens[:, 6:13], plan, layout)
    assert torch.equal(again, expected), "the cache of the prompts is as it was"
    assert torch.equal(drawn, tokens[:, 10:])
    torch.testing.assert_close(torch.stack(seen, 1), expected[:, 3:], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(vanilla[:, 3:], expected[:, 3:], atol=1e-2), "or the policy did nothing"
    assert torch.cat([step for one in found for step in one.active]).sum() == torch.cat(routing.active).sum()


def test_problems_are_grouped_by_their_tokens_and_fill_their_batches(tokenizer):
    groups = list(group_problems(tokenizer, TOLD, 2))
    assert all(len(group.answers) % 2 == 0 for group in groups)
    assert all(len(group.solved) == len(group.questions) == len(group.answers) for group in groups)
    kept = [tokenizer.decode(row.tolist()) for group in groups for row in group.questions]
    assert set(kept) <= {text.split("\n")[1] for text, _ in TOLD}
    with pytest.raises(ValueError, match=r"^problems must include 99 of equally many tokens \(got "):
        list(group_problems(tokenizer, TOLD, 99))


def test_a_policy_is_compared_on_the_same_batches():
    def outcome(shift):
        values = torch.linspace(0, 0.5, 10, dtype=torch.float64) + shift
        return Outcome(dict.fromkeys(samples.FIGURES, values), 0.0)

    error = 0.5 / 9 * (82.5 / 9) ** 0.5 / 10**0.5
    wanted = {"value": 0.5, "error": error, "delta": 0.25, "delta_error": 0}
    assert compare(outcome(0.25), outcome(0.0))["pass_all"] == pytest.approx(wanted)


def test_command_measures_into_a_record(measure, monkeypatch):
    """A budget of all experts draws what vanilla draws; of a random model no answer is right, and all differ."""
    policies, outcomes = ("xshare:k0=1,add=16", "xshare:k0=1,add=0"), []
    monkeypatch.setattr(samples, "compare", lambda *found: outcomes.append(found[0]) or compare(*found))
    points = measure(samples.main, "samples", *policies, *["--problems", "24", "--samples", "2", "--batch", "4"])
    assert list(points) == ["vanilla", *policies]
    vanilla, full, few = points.values()
    assert {len(values) for one in outcomes for values in one.figures.values()} == {vanilla["problems"] * 2 // 4}
    assert {name: full[name] for name in samples.FIGURES} == {name: vanilla[name] for name in samples.FIGURES}
    assert few["active_experts"] < full["active_experts"] == vanilla["active_experts"]
    assert vanilla["distinct"]["value"] > 0.9
    assert vanilla["pass_all"]["value"] >= vanilla["pass_one"]["value"]
    assert vanilla["pass_one"]["delta"] == vanilla["pass_one"]["delta_error"] == 0
