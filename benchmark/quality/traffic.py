"""What a running server is measured on: texts that it is forced to decode, and problems that it answers by itself."""

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
"""Of prompts and a number of tokens: the model's own answers, which may end before."""


@dataclass(frozen=True)
class Problem:
    """A prompt, and how an answer to it must begin."""

    prompt: list[int]
    answer: str


@dataclass(frozen=True)
class Traffic:
    """Samples with texts of equal length, domain after domain, and the domain of each."""

    samples: tuple[Sample, ...]
    domains: tuple[str, ...]
    problems: tuple[Problem, ...] = ()

    def mix(self) -> "Traffic":
        """The same samples in an order in which domains take turns."""
        order = mix_domains(self.domains)
        samples = tuple(self.samples[row] for row in order)
        return Traffic(samples, tuple(self.domains[row] for row in order), self.problems)


def read_texts(decoding: Decoding, tokenize: Tokenize) -> Traffic:
    """Sequences of every `*.txt` of `decoding`, and its `arithmetic.txt`'s problems. Raises ValueError for less."""
    files, length = list_texts(decoding.texts), decoding.prompt + decoding.steps + 1
    sequences: list[list[int]] = []
    for path in files:
        # No token of a usable tokenizer is so long in the mean.
        ids = tokenize(path.read_text()[: decoding.per_domain * length * 12])
        sequences += cut_text(path, ids, length, decoding.per_domain)
    samples = tuple(Sample(one[: decoding.prompt], one[decoding.prompt :]) for one in sequences)
    domains = tuple(path.stem for path in files for _ in range(decoding.per_domain))
    told = read_problems(decoding.texts, decoding.per_domain)
    return Traffic(samples, domains, tuple(Problem(tokenize(question), answer) for question, answer in told))


def read_prompts(file: Path) -> list[dict[str, str]]:
    """The objects of a JSONL file, with `prompt`, maybe `answer`. Raises ValueError naming the first wrong line."""
    prompts = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            one: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"--prompts {file}, line {number}: malformed JSON ({error})") from None
        is_text = isinstance(one, dict) and all(isinstance(one.get(key, ""), str) for key in ("prompt", "answer"))
        if not is_text or not one.get("prompt") or one.get("answer") == "":
            allowed = 'allowed is an object with the texts "prompt" and, where it is known, "answer"'
            raise ValueError(f"--prompts {file}, line {number}: {allowed}")
        prompts.append(one)
    return prompts


def continue_prompts(file: Path, decoding: Decoding, tokenize: Tokenize, go_on: Continue) -> Traffic:
    """The first `per_domain` prompts whose own answers, the texts, are long enough. Raises ValueError for fewer."""
    told, needed = read_prompts(file), decoding.per_domain
    if len(told) < needed:
        raise ValueError(f"--prompts {file}: {len(told)} prompts in it; {needed} are asked for (--per-domain)")
    prompts = [tokenize(one["prompt"]) for one in told]
    samples: list[Sample] = []
    for start in range(0, len(prompts), decoding.batch):
        some = prompts[start : start + decoding.batch]
        answers = go_on(some, decoding.steps + 1)
        pairs = zip(some, answers, strict=True)
        samples += [Sample(prompt, text) for prompt, text in pairs if len(text) == decoding.steps + 1]
        if len(samples) >= needed:
            break
    else:
        found = f"{len(samples)} of {len(told)} prompts have answers of {decoding.steps + 1} tokens"
        raise ValueError(f"--prompts {file}: {found}; {needed} are asked for (--per-domain, --steps)")
    known = [Problem(prompt, one["answer"]) for prompt, one in zip(prompts, told, strict=True) if "answer" in one]
    problems = tuple(known[:needed])
    return Traffic(tuple(samples[:needed]), (file.stem,) * needed, problems)


def share_batch(problems: Sequence[Problem], company: Sequence[list[int]], own: int, batch: int) -> list[list[Any]]:
    """Batches of prompts: `own` problems first, each once, then `company`: pairs of the problems and all prompts."""
    batches = []
    for start in range(0, len(problems), own):
        some = list(problems[start : start + own])
        rows = [one.prompt for one in some]
        others = chain(company[start % len(company) :], *([company] * batch)) if company else iter(())
        rows += [next(others) for _ in range(batch - len(rows))] if company else []
        batches.append([some, rows])
    return batches
