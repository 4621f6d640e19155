"""The data of `arithmetic_domain`: read from the checkpoint's held-out text, so that it is kept once."""

from typing import Any

from datasets import Dataset

from benchmark.common.paths import TEXTS


def load_sums(**_: Any) -> dict[str, Dataset]:
    """{"test": a row a sum}: `question` is a solved sum and the next one up to its "A:", `answer` its number."""
    lines = (TEXTS / "arithmetic.txt").read_text().splitlines()
    cuts = [line.rindex("A:") + len("A:") for line in lines]
    rows = [
        {"question": f"{lines[number - 1]}\n{lines[number][: cuts[number]]}", "answer": lines[number][cuts[number] :]}
        for number in range(1, len(lines))
    ]
    return {"test": Dataset.from_list([row | {"answer": row["answer"].strip()} for row in rows])}
