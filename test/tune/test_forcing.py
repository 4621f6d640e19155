"""Teacher forcing: the forced token is decoded, and its log-probability tells the model's own, and its favourite."""

import pickle

import pytest
import torch

from sglang_xshare.tune.forcing import MOST, Force, read_step, serialize_force

VOCABULARY = 50


def decode(logits, tokens):
    """What upstream's greedy sampler makes of a step: (token, its log-probability, the next best token) a row."""
    masked = Force()(logits.clone(), [{"tokens": [token]} for token in tokens]).float().log_softmax(1)
    assert not masked.isnan().any()
    best = masked.topk(2)
    return [
        (ids[0], scores[0], ids[1] if scores[1] > -float("inf") else None)
        for ids, scores in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


@pytest.mark.parametrize("spread", [0.1, 1.0, 8.0])
def test_nats_and_the_favourite_come_back(spread):
    generator = torch.Generator().manual_seed(0)
    logits = spread * torch.randn(400, VOCABULARY, generator=generator)
    tokens = torch.randint(VOCABULARY, (400,), generator=generator).tolist()
    tokens[:200] = logits[:200].argmax(1).tolist()
    nats = -logits.log_softmax(1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    for token, row, wanted, (found, log_probability, rival) in zip(
        tokens, logits, nats.tolist(), decode(logits, tokens), strict=True
    ):
        assert found == token
        told, greedy = read_step(log_probability, found, rival)
        assert told == pytest.approx(min(wanted, MOST), abs=5e-5)
        assert greedy == row.argmax()


def test_a_certain_token():
    logits = torch.full((1, 4), -1e9)
    logits[0, 2] = 0
    [(token, log_probability, _)] = decode(logits, [2])
    assert (token, read_step(log_probability, 2, None)) == (2, (0.0, 2))
    [(token, log_probability, rival)] = decode(logits, [1])
    assert token == 1
    assert read_step(log_probability, 1, rival) == (pytest.approx(MOST, abs=1e-3), 2)


def test_each_row_follows_its_own_text():
    rows = [{"tokens": [5, 6, 7]}, {"tokens": [1, 2, 3]}]
    force = Force()
    assert [force(torch.zeros(2, 8), rows).argmax(1).tolist() for _ in range(3)] == [[5, 1], [6, 2], [7, 3]]
    assert [row["step"] for row in rows] == [2, 2]


def test_it_is_pickled_by_name():
    text = serialize_force()
    assert len(text) < 300
    assert pickle.loads(bytes.fromhex(__import__("json").loads(text)["callable"])) is Force
