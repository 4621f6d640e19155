"""The traffic for a server: texts that the server is forced to decode, and problems that it answers freely."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from benchmark.quality.decoding import Decoding
from benchmark.quality.served import read_problems
from benchmark.quality.text import cut_text, list_texts, mix_domains
from sglang_xshare.tune.texts import Sample

Tokenize = Callable[[str], list[int]]
Continue = Callable[[list[list[int]], int], list[list[int]]]
"""A function that returns the model's own answers to prompts. The second argument limits the tokens of an answer."""


@dataclass(frozen=True)
class Problem:
    """A problem: a prompt and the text with which a right answer begins."""

    prompt: list[int]
    answer: str


@dataclass(frozen=True)
class Traffic:
    """The samples, the domain of each sample, and the problems. The texts of all samples have equal length."""

    samples: tuple[Sample, ...]
    domains: tuple[str, ...]
    problems: tuple[Problem, ...] = ()

    def mix(self) -> "Traffic":
        """Return the same samples in an order in which the domains alternate."""
        order = mix_domains(self.domains)
        samples = tuple(self.samples[row] for row in order)
        return Traffic(samples, tuple(self.domains[row] for row in order), self.problems)


def read_texts(decoding: Decoding, tokenize: Tokenize) -> Traffic:
    """Read the samples and the problems from the texts of `decoding`. Raises ValueError if a text is too short."""
    files, length = list_texts(decoding.texts), decoding.prompt + decoding.steps + 1
    sequences: list[list[int]] = []
    for path in files:
        # A token has fewer than 12 characters on average, so this part of the text is long enough.
        ids = tokenize(path.read_text()[: decoding.per_domain * length * 12])
        sequences += cut_text(path, ids, length, decoding.per_domain)
    samples = tuple(Sample(one[: decoding.prompt], one[decoding.prompt :]) for one in sequences)
    domains = tuple(path.stem for path in files for _ in range(decoding.per_domain))
    problems = read_problems(decoding.texts, decoding.per_domain)
    return Traffic(samples, domains, tuple(Problem(tokenize(question), answer) for question, answer in problems))


def read_prompts(file: Path) -> list[dict[str, str]]:
    """Read a JSON Lines file of prompts.

    Each line is an object with a `prompt` and optionally an `answer`. Raises ValueError if a line is wrong.
    """
    prompts = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            one: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"--prompts {file}, line {number} must be JSON (got {error})") from None
        is_text = isinstance(one, dict) and all(isinstance(one.get(key, ""), str) for key in ("prompt", "answer"))
        if not is_text or not one.get("prompt") or one.get("answer") == "":
            wanted = 'must be an object with the texts "prompt" and, if it is known, "answer"'
            raise ValueError(f"--prompts {file}, line {number} {wanted}")
        prompts.append(one)
    return prompts


def continue_prompts(file: Path, decoding: Decoding, tokenize: Tokenize, go_on: Continue) -> Traffic:
    """Read prompts from a file and use the model's own answers as texts.

    Prompts with too short answers are skipped. Raises ValueError if fewer than `per_domain` prompts remain.
    """
    lines, needed = read_prompts(file), decoding.per_domain
    if len(lines) < needed:
        raise ValueError(f"--prompts {file} must have {needed} prompts, as --per-domain (got {len(lines)})")
    prompts = [tokenize(one["prompt"]) for one in lines]
    samples: list[Sample] = []
    for start in range(0, len(prompts), decoding.batch):
        some = prompts[start : start + decoding.batch]
        answers = go_on(some, decoding.steps + 1)
        pairs = zip(some, answers, strict=True)
        samples += [Sample(prompt, text) for prompt, text in pairs if len(text) == decoding.steps + 1]
        if len(samples) >= needed:
            break
    else:
        wanted = f"{needed} prompts (--per-domain) with answers of {decoding.steps + 1} tokens (--steps)"
        raise ValueError(f"--prompts {file} must have {wanted} (got {len(samples)} of {len(lines)})")
    known = [Problem(prompt, one["answer"]) for prompt, one in zip(prompts, lines, strict=True) if "answer" in one]
    problems = tuple(known[:needed])
    return Traffic(tuple(samples[:needed]), (file.stem,) * needed, problems)


def share_batch(problems: Sequence[Problem], company: Sequence[list[int]], own: int, batch: int) -> list[list[Any]]:
    """Return batches of `own` problems each, filled up with other prompts.

    Each batch is a pair: the problems, and all prompts of the batch. `company` contains the other prompts.
    """
    batches = []
    for start in range(0, len(problems), own):
        some = list(problems[start : start + own])
        rows = [one.prompt for one in some]
        others = chain(company[start % len(company) :], *([company] * batch)) if company else iter(())
        rows += [next(others) for _ in range(batch - len(rows))] if company else []
        batches.append([some, rows])
    return batches
