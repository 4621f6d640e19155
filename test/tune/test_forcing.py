"""Teacher forcing: the forced token is decoded, and its log-probability tells the model's own, and its favourite."""

import math
import pickle

import pytest
import torch

from sglang_xshare.live.client import PolicyError
from sglang_xshare.tune.forcing import MOST, Force, Prediction, read_step, serialize_force
from sglang_xshare.tune.server import Server

VOCABULARY = 50


def decode(logits, tokens):
    """Of upstream's greedy sampler, a row: (token, log-probability, the others'), None for minus infinity."""
    masked = Force()(logits.clone(), [{"tokens": [token]} for token in tokens]).float().log_softmax(1)
    assert not masked.isnan().any()
    best = masked.topk(logits.shape[1])
    for ids, told in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        others = [(one if one > -math.inf else None, token) for token, one in zip(ids[1:], told[1:], strict=True)]
        yield ids[0], told[0], others


@pytest.mark.parametrize("spread", [0.1, 1.0, 8.0])
def test_nats_and_the_favourite_come_back(spread):
    generator = torch.Generator().manual_seed(0)
    logits = spread * torch.randn(400, VOCABULARY, generator=generator)
    tokens = torch.randint(VOCABULARY, (400,), generator=generator).tolist()
    tokens[:200] = logits[:200].argmax(1).tolist()
    nats = -logits.log_softmax(1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    for token, row, wanted, (found, log_probability, others) in zip(
        tokens, logits, nats.tolist(), decode(logits, tokens), strict=True
    ):
        assert found == token
        told = read_step(log_probability, found, others)
        assert told.nats == pytest.approx(min(wanted, MOST), abs=5e-5)
        assert told.greedy == row.argmax()
        probabilities = torch.zeros(VOCABULARY)
        probabilities[list(told.likeliest)] = torch.tensor(list(told.likeliest.values())).exp()
        torch.testing.assert_close(probabilities, row.softmax(0), rtol=1e-3, atol=2e-5)


def test_a_certain_token():
    logits = torch.full((1, 4), -1e9)
    logits[0, 2] = 0
    [(token, log_probability, others)] = decode(logits, [2])
    assert (token, read_step(log_probability, 2, others)) == (2, Prediction(0.0, 2, {2: 0.0}))
    [(token, log_probability, others)] = decode(logits, [1])
    told = read_step(log_probability, 1, others)
    assert (token, told.nats, told.greedy) == (1, pytest.approx(MOST, abs=1e-3), 2)
    assert told.likeliest[2] == pytest.approx(0, abs=1e-6)


def test_each_row_follows_its_own_text_and_is_then_the_model_s_own():
    force, logits, rows = Force(), torch.randn(2, 8), [{"tokens": [5, 6]}, {"tokens": [1, 2, 3]}]
    steps = [force(logits.clone(), rows) for _ in range(3)]
    assert [step.argmax(1).tolist() for step in steps[:2]] == [[5, 1], [6, 2]]
    assert torch.equal(steps[2][0], logits[0])
    assert steps[2][1].argmax() == 3
    assert [row["step"] for row in rows] == [2, 2]


def test_a_server_predicts_each_forced_token_but_the_prefills(monkeypatch):
    # The second report says that the model prefers 9 to 6.
    top = [[(-0.1, 5, None), (-3.0, 9, None)], [(-0.355, 6, None), (-2.0, 9, None)]]
    info = {"output_token_logprobs": [one[0] for one in top], "output_top_logprobs": top}
    answers = [{"output_ids": [5, 6], "meta_info": info}]
    asked = []
    monkeypatch.setattr(Server, "ask", lambda self, path, body, timeout: asked.append(body) or answers)
    server = Server("http://127.0.0.1:1")
    [[told]] = server.force([[1]], [[5, 6]])
    assert (told.nats, told.greedy, set(told.likeliest)) == (pytest.approx(1.0), 9, {6, 9})
    with pytest.raises(PolicyError, match="other tokens than the forced ones"):
        server.force([[1]], [[5, 7]])
    [params] = asked[0]["sampling_params"]
    assert params["custom_params"] == {"tokens": [5, 6], "expert_policy": "shared"}, "not exact, whatever the default"


def test_it_is_pickled_by_name():
    text = serialize_force()
    assert len(text) < 300
    assert pickle.loads(bytes.fromhex(__import__("json").loads(text)["callable"])) is Force
