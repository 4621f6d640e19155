"""Scores of a task, document by document, and what they differ by from one pass to another."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from numbers import Real
from statistics import fmean, stdev
from typing import Any


@dataclass(frozen=True)
class Score:
    """A metric of a task, `name` as the harness writes it, with its filter: the value, its standard error where the
    harness has one, and each document's value in the order of the documents, [] where a document has none of its own.
    """

    task: str
    name: str
    value: float
    error: float | None
    documents: list[float]


@dataclass(frozen=True)
class Difference:
    """Of two means over the same documents: the mean of the differences, and its standard error."""

    value: float
    error: float


def read_scores(results: Mapping[str, Any]) -> list[Score]:
    """The scores in what the harness returns, task by task."""
    scores = []
    for task, measured in results["results"].items():
        for name, value in measured.items():
            metric, comma, kept = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, Real):
                continue
            error = measured.get(f"{metric}_stderr,{kept}")
            samples = [one for one in results["samples"].get(task, ()) if one.get("filter", kept) == kept]
            samples.sort(key=lambda one: one["doc_id"])
            documents = [one.get(metric) for one in samples]
            told = documents if all(isinstance(one, Real) for one in documents) else []
            scores.append(
                Score(
                    task,
                    f"{metric}, {kept}" if kept != "none" else metric,
                    float(value),
                    float(error) if isinstance(error, Real) else None,
                    [float(one) for one in told if one is not None],
                )
            )
    return scores


def compare_scores(score: Score, baseline: Score) -> Difference | None:
    """The score less the baseline's, paired by document; None where documents have no values, or not the mean is told.

    Pairing leaves out what documents differ by among themselves, which is most of either score's own error.
    """
    pairs = list(zip(score.documents, baseline.documents, strict=False))
    is_mean = len(score.documents) == len(baseline.documents) >= 2 and all(
        abs(fmean(one.documents) - one.value) < 1e-6 for one in (score, baseline)
    )
    if not is_mean:
        return None
    differences = [one - other for one, other in pairs]
    return Difference(fmean(differences), stdev(differences) / sqrt(len(differences)))
