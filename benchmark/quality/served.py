"""The quality of a running server: the loss of real text forced through its own decode steps, and answers to sums."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmark.common.server import Server
from benchmark.quality.forcing import serialize_force

SERVER_ARGS = ("--enable-custom-logit-processor",)


def measure_nats(server: Server, tokens: torch.Tensor, prompt: int, batch: int) -> torch.Tensor:
    """Decode every sequence after its first `prompt` tokens, `batch` sequences at a time, on a server of this machine
    that was started with `SERVER_ARGS` and without speculation; `tokens` are [sequences, length] int64.

    Returns [sequences, length - prompt - 1] float32: -log P of every token after the prompt but the first, which is
    the prefill's.
    """
    forced = tokens[:, prompt:]
    nats = torch.full(forced.shape, torch.nan)
    processor = serialize_force()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "nats.jsonl"
        for rows in torch.arange(len(tokens)).split(batch):
            params = [{"row": row, "tokens": forced[row].tolist(), "file": str(file)} for row in rows.tolist()]
            sampling = [{"max_new_tokens": forced.shape[1], "ignore_eos": True, "custom_params": one} for one in params]
            body = {
                "input_ids": tokens[rows, :prompt].tolist(),
                "sampling_params": sampling,
                "custom_logit_processor": processor,
            }
            answers = server.post("/generate", body)
            if [answer["output_ids"] for answer in answers] != forced[rows].tolist():
                raise RuntimeError(f"{server.name} decoded other tokens than those it was forced to")
        for line in file.read_text().splitlines():
            for row, step, loss in json.loads(line):
                nats[row, step] = loss
    return nats[:, 1:]


def measure_sums(server: Server, texts: Path, count: int) -> float | None:
    """Share of the first `count` arithmetic problems of the held-out text answered right, each after a solved one; None
    where the text has none.
    """
    path = texts / "arithmetic.txt"
    if not path.exists():
        return None
    lines = path.read_text().splitlines()[: count + 1]
    cuts = [line.rindex("A:") + len("A:") for line in lines]
    problems = [(f"{lines[i - 1]}\n{lines[i][: cuts[i]]}", f"{lines[i][cuts[i] :]}\n") for i in range(1, len(lines))]
    return measure_answers(server, problems, batch=16)


def measure_answers(server: Server, problems: Sequence[tuple[str, str]], batch: int) -> float:
    """The share of `problems`, (question, answer) each, that it answers right greedily, `batch` at a time."""
    right = 0
    for start in range(0, len(problems), batch):
        chunk = problems[start : start + batch]
        answers = server.generate([question for question, _ in chunk], max_new_tokens=8, ignore_eos=True)
        right += sum(given["text"].startswith(wanted) for given, (_, wanted) in zip(answers, chunk, strict=True))
    return right / len(problems)
