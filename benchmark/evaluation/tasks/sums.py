"""The data of the task `arithmetic_domain`. It comes from the checkpoint's held-out text."""

from typing import Any

from datasets import Dataset

from benchmark.common.paths import TEXTS
from benchmark.quality.served import read_problems


def load_sums(**_: Any) -> dict[str, Dataset]:
    """Load the arithmetic problems as the split "test".

    The `question` of a row contains a solved problem and the next problem up to "A:". The `answer` is a number.
    """
    rows = [{"question": question, "answer": answer.strip()} for question, answer in read_problems(TEXTS)]
    return {"test": Dataset.from_list(rows)}
