"""The data of `arithmetic_domain`, read from the checkpoint's held-out text."""

from typing import Any

from datasets import Dataset

from benchmark.common.paths import TEXTS
from benchmark.quality.served import read_problems


def load_sums(**_: Any) -> dict[str, Dataset]:
    """Return {"test": a row a sum}: `question` is a solved sum and the next one up to "A:", `answer` its number."""
    rows = [{"question": question, "answer": answer.strip()} for question, answer in read_problems(TEXTS)]
    return {"test": Dataset.from_list(rows)}
