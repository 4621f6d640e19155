"""`python -m benchmark.quality.drafts`: its steps, and all of it on a small random model."""

from dataclasses import replace
from itertools import pairwise

import torch

from benchmark.common.variant import parse_plan
from benchmark.quality.drafts import __main__ as command
from benchmark.quality.drafts.layout import OWN, Drafted
from benchmark.quality.drafts.report import KINDS
from benchmark.quality.model import prefill

LAYOUT = Drafted(2, 4, 0.5)
SEQUENCES, TOKENS = 8, 96


PLACES = torch.arange(SEQUENCES)[:, None] * 100 + torch.arange(TOKENS)
"""Of each token its sequence's number and its place there, hundreds and units."""


def split_places():
    """[steps, requests, 4]: the place of each row."""
    return LAYOUT.split(PLACES[..., None])[..., 0].unflatten(1, (2, 4))


def describe(field, **layout):
    """[steps, requests, 4]: what selection is told of each row."""
    steps = replace(LAYOUT, **layout).describe(SEQUENCES, TOKENS)
    return torch.stack([getattr(one, field) for one in steps]).unflatten(1, (2, 4))


def test_a_step_goes_on_behind_what_the_former_has_emitted():
    steps = split_places()
    for request in (0, 1):
        lengths = []
        for step in steps[:, request]:
            if step[0] // 100 != request:
                break  # of the next two sequences
            assert step[0] % 100 == sum(lengths)
            own = (step == step[0] + torch.arange(4)).long().cumprod(0).sum()
            others = step[own:]
            assert (others // 100 != request).all()
            assert all(after == before + 1 for before, after in pairwise(others.tolist()))
            lengths.append(int(own))
        assert sum(lengths) > TOKENS * 0.6
        assert 1.5 < sum(lengths) / len(lengths) < 2.3, "1.875 in the mean"


def test_only_what_is_emitted_comes_back_and_is_told_where_asked():
    own = torch.full((SEQUENCES, TOKENS, 1), -1.0)
    steps = split_places().flatten(1)[..., None].float()
    joined = LAYOUT.join(steps, own)[..., 0]
    counted = LAYOUT.count(SEQUENCES, TOKENS)
    assert torch.equal(joined.long(), torch.where(counted, PLACES, -1))
    assert counted[:, 0].all()
    assert 0.6 < counted.float().mean() < 1
    assert int(describe("valid", told=True).sum()) == int(counted.sum())
    assert next(LAYOUT.describe(SEQUENCES, TOKENS)).valid is None


def test_selection_is_told_of_each_drafts_own_chance_where_asked():
    even = OWN ** describe("depth", own=True)
    assert torch.allclose(even, (0.5 ** torch.arange(4)).expand_as(even), rtol=0.03)
    chances = OWN ** describe("depth", spread=0.25, own=True)
    assert (chances[..., 0] == 1).all()
    assert (chances.diff(dim=-1) <= 0).all()
    first = chances[..., 1]
    assert 0.24 < first.min() < 0.3
    assert 0.7 < first.max() < 0.76
    likely = first > 0.5
    share = describe("valid", spread=0.25, told=True)[..., 1].float()
    assert share[likely].mean() > share[~likely].mean() + 0.1, "they are what drafts are right by"


def test_vanilla_is_the_model_and_wrong_drafts_do_harm(model):
    tokens = torch.randint(0, 300, (SEQUENCES, 16 + TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        prefilled, text = prefill(model, tokens[:, :16]), tokens[:, 16:]
        expected = model(tokens).logits[:, 16:]
        own, _ = prefilled.decode(text, parse_plan("vanilla"), LAYOUT)
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)
        plan = parse_plan("xshare:k0=1,add=1")
        found, routing = prefilled.decode(text, plan, LAYOUT)
        told, fewer = prefilled.decode(text, plan, replace(LAYOUT, told=True))
    assert not torch.allclose(found, told)
    assert torch.cat(fewer.active).mean() < torch.cat(routing.active).mean()


def test_command_measures_into_a_record(measure):
    asked = "--add", "1", "4", "--batch", "1", "2", "--tokens-per-request", "4", "--chance", "0.5"
    points = measure(command.main, "drafts", *asked, "--per-domain", "4", "--prompt", "16", "--steps", "12")
    assert len(points) == 2 * 2 * len(KINDS) * 2, "with and without chances of their own"
    weighed = [one["policy"] for one in points.values() if one["kind"] == "by 0.75, 4 warm rows"]
    assert all(policy.endswith(",acceptance=0.75,warm_rows=4") for policy in weighed)
