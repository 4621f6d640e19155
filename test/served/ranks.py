"""Servers of several ranks: their flags, an uneven load, and what every rank of them did."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmark.common.server import Server, bind_ranks
from served.answers import LAYERS, greedy, make_server, policy, read_lines, read_metrics, read_prompts

TWO_CORES = bind_ranks(2)
TWO, OLD_TWO = ("--tp", "2", "--attn-dp-size", "2"), ("--tp", "2", "--dp", "2", "--enable-dp-attention")
FOUR = ("--tp", "4", "--attn-dp-size", "4")
TWO_OF_TWO = ("--tp", "4", "--attn-dp-size", "2")
XSHARE: dict[str, Any] = {"policy": "xshare", "k0": 1, "add": 8}
WIDE: dict[str, Any] = {"policy": "xshare", "k0": 1, "add": 64, "utility": "full"}
PER_REQUEST = {"policy": "xshare", "k0": 1, "add": 0, "add_per_request": 4}
PER_RANK = {"policy": "xshare", "k0": 1, "target_per_rank": 5}
REQUESTS = (
    *((number, 0.0, 6 + 7 * number) for number in range(3)),  # one rank has two of them, and one is left alone
    *((number, 1.5 + 0.15 * number, 10 + number % 4 * 8) for number in range(3, 13)),  # they come while others decode
)
"""What a server is asked, after one request by itself: a prompt, at which second, and for how many tokens."""


@dataclass(frozen=True)
class Answers:
    """What a server said and did; `steps` has one entry a step and layer: the call of every rank, in step."""

    tokens: list[list[int]]
    steps: list[tuple[dict[str, Any], ...]]
    metrics: dict[str, float]
    trace: list[dict[str, Any]]

    @property
    def selecting(self) -> list[tuple[dict[str, Any], ...]]:
        """Decode and verify steps in which no rank prefilled."""
        return [calls for calls in self.steps if not calls[0]["prefills"]]


def keys_of(plan: Mapping[str, Any]) -> tuple[str, ...]:
    return policy(**{"name" if key == "policy" else key: value for key, value in plan.items()})


def ask(server: Server, prompts: Sequence[str]) -> list[list[int]]:
    """Greedy answers to the requests above."""

    def generate(request: tuple[int, float, int]) -> list[int]:
        number, start, length = request
        time.sleep(start)
        body = {"text": prompts[number], "sampling_params": greedy(length)}
        return server.post("/generate", body, timeout=120)["output_ids"]

    alone = generate((15, 0.0, 5))
    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        return [alone, *threads.map(generate, REQUESTS)]


def serve(model: Path, tree: Path, flags: tuple[str, ...], scratch: Path) -> Answers:
    """What a server of several ranks does."""
    ranks = int(flags[flags.index("--tp") + 1])
    server, probe, trace = make_server(model, tree, flags, scratch, bind_ranks(ranks))
    with server:
        tokens = ask(server, read_prompts(model))
        calls = [[call for call in read_lines(probe) if call["rank"] == rank] for rank in range(ranks)]
        metrics = read_metrics(server, len(calls[0]) // LAYERS)
        return Answers(tokens, list(zip(*calls, strict=True)), metrics, read_lines(trace))


def live(call: dict[str, Any]) -> torch.Tensor:
    """[rows] bool by what the scheduler has synchronized: each rank's rows begin with its own, without padding."""
    live = [torch.arange(padded) < own for own, padded in zip(call["own"], call["padded"], strict=True)]
    return torch.cat(live)


def check_load(answers: Answers) -> None:
    """The load was uneven: an idle rank, a shorter one, and ranks that decode while another prefills."""
    loads = [calls[0]["own"] for calls in answers.selecting]
    assert any(0 in own for own in loads)
    assert any(0 < min(own) < max(own) for own in loads)
    modes = [{call["mode"] for call in calls} for calls in answers.steps if calls[0]["prefills"]]
    assert {"EXTEND", "DECODE"} in modes or {"EXTEND", "IDLE"} in modes
