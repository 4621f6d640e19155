"""What training asks of a server under a policy: the experts that it used, which replay its log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import pytest
import torch
from transformers import PreTrainedModel

from benchmark.quality.model import load_model
from benchmark.quality.routing import Choice, find_gates
from served import host
from served.answers import LAYERS, make_server, policy, read_prompts
from served.eagle import TOP_K
from served.release import older_releases_take_long

TRUNCATED = {"policy": "custom", "k0": 0, "budget": 8, "coverage": "truncate", "rescue": False}
FOUR = policy(
    "xshare",
    k0=1,
    add=4,
    layers={"1": {"own_share": 0.75, "utility": "squared"}, "2": {"policy": "pruned", "k0": 2}, "3": TRUNCATED},
)
"""By layer: as published; shares of the own sum; empty slots in every row; rows that are left with no expert at all."""
OWN_SHARES = (0.0, 0.75, 0.0, 1.0)
"""What a trainer has to know of these: how far a row is divided by the sum over its own top-k, by layer."""


def read_experts(answer: Mapping[str, Any]) -> torch.Tensor:
    """[tokens but the last, layers, top-k] expert ids as returned."""
    found = np.frombuffer(pybase64.b64decode(answer["meta_info"]["routed_experts"]), dtype=np.int32)
    return torch.tensor(found.reshape(-1, LAYERS, TOP_K))


def read_rollout(answer: Mapping[str, Any]) -> tuple[list[int], torch.Tensor]:
    """(tokens of prompt and answer, the log-probabilities of all but the first)."""
    meta = answer["meta_info"]
    said = [*meta["input_token_logprobs"], *meta["output_token_logprobs"]]
    return [token for _, token, *_ in said], torch.tensor([found for found, *_ in said[1:]])


def weigh(logits: torch.Tensor, ids: torch.Tensor, own_share: float) -> Choice:
    """What a trainer makes of returned experts [rows, k]: -1 is none, and has no weight."""
    scores = logits.softmax(-1)
    chosen = scores.gather(1, ids.clamp(min=0)) * (ids >= 0)
    whole = chosen.sum(1, keepdim=True) ** (1 - own_share) * scores.topk(TOP_K).values.sum(1, keepdim=True) ** own_share
    return ids.clamp(min=0), chosen / whole


@torch.inference_mode()
def replay(
    model: PreTrainedModel, tokens: Sequence[int], experts: torch.Tensor, own_shares: Sequence[float]
) -> torch.Tensor:
    """Transformers' log-probabilities of all tokens but the first, where its layers use these experts."""
    with ExitStack() as stack:
        for layer, gate in enumerate(find_gates(model)):
            ids, share = experts[:, layer].long(), own_shares[layer]
            stack.callback(gate.intercept(lambda logits, own, ids=ids, share=share: weigh(logits, ids, share)).remove)
        logits = model(torch.tensor([tokens[:-1]])).logits[0]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def ask(server: Any, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Rollouts of different lengths, drawn at temperature 1."""
    sampling = [{"temperature": 1.0, "max_new_tokens": 8 + 2 * n, "ignore_eos": True} for n in range(len(prompts))]
    wanted = {"return_logprob": True, "logprob_start_len": 0, "return_routed_experts": True}
    answers: list[dict[str, Any]] = server.post(
        "/generate", {"text": list(prompts), "sampling_params": sampling, **wanted}
    )
    return answers


@older_releases_take_long
def test_returned_experts_replay_the_log_probabilities(release, tiny_model: Path, patched_release, tmp_path):
    host.install(tmp_path)
    flags = (*FOUR, "--enable-return-routed-experts")
    server, _, _ = make_server(tiny_model, patched_release(release), flags, tmp_path)
    with server:
        answers = ask(server, read_prompts(tiny_model))
    model = load_model(tiny_model)
    apart = []
    for answer in answers:
        tokens, served = read_rollout(answer)
        experts, prompt = read_experts(answer), answer["meta_info"]["prompt_tokens"]
        assert len(experts) == len(tokens) - 1
        torch.testing.assert_close(replay(model, tokens, experts, OWN_SHARES), served, rtol=0, atol=1e-4)
        apart.append((model_alone(model, tokens) - served).abs()[prompt:].mean())
        check_slots(experts[:prompt], experts[prompt:])
    assert min(apart) > 0.01, "without the experts, a trainer computes something else"


@torch.inference_mode()
def model_alone(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """As `replay`, by the model's own routing."""
    logits = model(torch.tensor([tokens[:-1]])).logits[0]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def check_slots(prefilled: torch.Tensor, decoded: torch.Tensor) -> None:
    """Prefill fills every slot; in decode one of -1 is empty, and no expert stands twice."""
    assert (prefilled >= 0).all()
    alone = (decoded[:, 2] >= 0).sum(1) != 2  # pruned to two, but for the last request's steps without the others
    assert alone.sum() <= 4
    for row in decoded.flatten(0, 1).tolist():
        used = [expert for expert in row if expert >= 0]
        assert len(set(used)) == len(used)
