"""The quality of a running server: the loss of real text forced through its own decode steps, and answers to sums."""

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmark.common.server import Server
from benchmark.quality.instrument import Instrument, Verifier

SERVER_ARGS = ("--enable-custom-logit-processor",)


def measure_nats(server: Server, tokens: torch.Tensor, prompt: int, batch: int, verified: bool = False) -> torch.Tensor:
    """Decode sequences after their first `prompt` tokens, `batch` at a time, on a server with `SERVER_ARGS`.

    `verified` verifies by `Verifier`, which a server with speculation needs. `tokens` are [sequences, length] int64.

    Returns [sequences, length - prompt - 1] float32: -log P of every token after the prompt except the first, which
    the prefill predicts.
    """
    running = (Verifier if verified else Instrument)(server.url)
    nats = []
    for some in tokens.split(batch):
        forced = running.force(some[:, :prompt].tolist(), some[:, prompt:].tolist())
        nats += [[step.nats for step in one] for one in forced]
    return torch.tensor(nats)


def measure_sums(server: Server, texts: Path, count: int) -> float | None:
    """Return the share of the first `count` arithmetic problems that are answered right; None without problems."""
    problems = read_problems(texts, count)
    return measure_answers(server, problems, batch=16) if problems else None


def read_problems(texts: Path, count: int | None = None) -> list[tuple[str, str]]:
    """Return (question, answer) of the first `count` arithmetic problems, or of all, each after a solved one."""
    path = texts / "arithmetic.txt"
    lines = path.read_text().splitlines()[: None if count is None else count + 1] if path.exists() else []
    if not all("A:" in line for line in lines):
        return []
    cuts = [line.rindex("A:") + len("A:") for line in lines]
    return [(f"{lines[i - 1]}\n{lines[i][: cuts[i]]}", f"{lines[i][cuts[i] :]}\n") for i in range(1, len(lines))]


def measure_answers(server: Server, problems: Sequence[tuple[str, str]], batch: int) -> float:
    """Return the share of `problems`, (question, answer) each, with a right greedy answer, `batch` at a time."""
    right = 0
    for start in range(0, len(problems), batch):
        chunk = problems[start : start + batch]
        answers = server.generate([question for question, _ in chunk], max_new_tokens=8, ignore_eos=True)
        right += sum(given["text"].startswith(wanted) for given, (_, wanted) in zip(answers, chunk, strict=True))
    return right / len(problems)
