"""Measurements of the quality of a running server: the loss on real text, and answers to arithmetic problems."""

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmark.common.server import Server
from benchmark.quality.instrument import Instrument, Verifier

SERVER_ARGS = ("--enable-custom-logit-processor",)


def measure_nats(server: Server, tokens: torch.Tensor, prompt: int, batch: int, verified: bool = False) -> torch.Tensor:
    """Force a server to decode sequences, and return the loss of every token.

    `tokens` [sequences, length] int64 contains the sequences. The first `prompt` tokens of each one are prefilled.
    `batch` sequences are decoded at a time. The server must have the flags `SERVER_ARGS`. `verified` must be true for a
    server with speculative decoding.

    Return -log P of each token, as [sequences, length - prompt - 1] float32. The first token after the prompt is
    omitted, because the prefill predicts it.
    """
    running = (Verifier if verified else Instrument)(server.url)
    nats = []
    for some in tokens.split(batch):
        forced = running.force(some[:, :prompt].tolist(), some[:, prompt:].tolist())
        nats += [[step.nats for step in one] for one in forced]
    return torch.tensor(nats)


def measure_sums(server: Server, texts: Path, count: int) -> float | None:
    """Return the share of right answers to the first `count` arithmetic problems.

    Return None if the texts contain no arithmetic problems.
    """
    problems = read_problems(texts, count)
    return measure_answers(server, problems, batch=16) if problems else None


def read_problems(texts: Path, count: int | None = None) -> list[tuple[str, str]]:
    """Read the (question, answer) pairs of the first `count` arithmetic problems, or of all problems.

    Each question also contains the previous problem with its answer.
    """
    path = texts / "arithmetic.txt"
    lines = path.read_text().splitlines()[: None if count is None else count + 1] if path.exists() else []
    if not all("A:" in line for line in lines):
        return []
    cuts = [line.rindex("A:") + len("A:") for line in lines]
    return [(f"{lines[i - 1]}\n{lines[i][: cuts[i]]}", f"{lines[i][cuts[i] :]}\n") for i in range(1, len(lines))]


def measure_answers(server: Server, problems: Sequence[tuple[str, str]], batch: int) -> float:
    """Send (question, answer) problems to the server, `batch` at a time, and return the share of right answers."""
    right = 0
    for start in range(0, len(problems), batch):
        chunk = problems[start : start + batch]
        answers = server.generate([question for question, _ in chunk], max_new_tokens=8, ignore_eos=True)
        right += sum(given["text"].startswith(wanted) for given, (_, wanted) in zip(answers, chunk, strict=True))
    return right / len(problems)
