"""The scores of tasks, and a table that compares the scores of several policies."""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from statistics import fmean
from typing import Any

from benchmark.common.comparison import NO_STEP, format_number
from benchmark.common.interval import find_margin
from benchmark.common.table import Table
from benchmark.common.variant import BASELINE, OFF


@dataclass(frozen=True)
class Score:
    """The value of one metric for a task.

    `name` contains the harness's name of the metric and of its filter. `error` is the harness's standard error, or None
    if it is unknown. `documents` contains the value of each document. It is empty if documents have no values.
    """

    task: str
    name: str
    value: float
    error: float | None
    documents: list[float]


def read_scores(results: Mapping[str, Any]) -> list[Score]:
    """Read the scores of all tasks from the harness's results."""
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
            values = documents if all(isinstance(one, Real) for one in documents) else []
            scores.append(
                Score(
                    task,
                    f"{metric}, {kept}" if kept != "none" else metric,
                    float(value),
                    float(error) if isinstance(error, Real) else None,
                    [float(one) for one in values if one is not None],
                )
            )
    return scores


def compare_scores(score: Score, baseline: Score) -> tuple[float, float] | None:
    """Return the difference from the baseline's score, and half the width of its 95 % interval.

    The difference is computed for each document. Return None if documents have no values, or if the score is not the
    mean of its documents.
    """
    pairs = list(zip(score.documents, baseline.documents, strict=False))
    is_mean = len(score.documents) == len(baseline.documents) >= 2 and all(
        abs(fmean(one.documents) - one.value) < 1e-6 for one in (score, baseline)
    )
    if not is_mean:
        return None
    differences = [one - other for one, other in pairs]
    return fmean(differences), find_margin(differences) or 0.0


NOTE = """\
Score: of lm-evaluation-harness, ± its standard error. Difference: from the first policy's, ± half the 95 % t-interval
of the differences document by document. Tokens/s: output tokens over the time of the task's requests, of one pass with
an empty prefix cache; `make bench` measures speed. Active experts: means over layers and steps under policy, counted by
the server; before the arrow those of upstream's own routing."""


def tabulate_evaluation(points: Mapping[str, Any]) -> Table:
    """Return a table with one row for each task, metric and policy. The first policy of a task is its baseline."""
    headings = ["task, metric", "policy", "score", "difference", "documents", "tokens/s", "active experts", "kept mass"]
    rows: list[list[str]] = []
    baselines: dict[tuple[str, str, str], Score] = {}
    for point in points.values():
        for fields in point["scores"]:
            score = Score(**fields)
            baseline = baselines.setdefault((point["task"], score.task, score.name), score)
            rows.append(
                [
                    f"{score.task}, {score.name}",
                    point["policy"],
                    _format_error(score.value, score.error),
                    "" if baseline is score else _format_difference(score, baseline),
                    str(len(score.documents) or "-"),
                    f"{point['tokens'] / point['seconds']:.1f}" if point["seconds"] else "-",
                    _format_experts(point),
                    format_number(point["kept_mass"], 3),
                ]
            )
    idle = list(dict.fromkeys(point["policy"] for point in points.values() if _is_idle(point)))
    note = f"{NOTE} {NO_STEP}: {', '.join(idle)}." if idle else NOTE
    return Table("Evaluation with the expert policy off and on", headings, rows, note, text_columns=2)


def _is_idle(point: Mapping[str, Any]) -> bool:
    return point["policy"].partition(":")[0] not in (BASELINE, OFF) and not point["policy_steps"]


def _format_experts(point: Mapping[str, Any]) -> str:
    if point["experts_after"] is None:
        return "-"
    return f"{point['experts_before']:.1f} -> {point['experts_after']:.1f}"


def _format_difference(score: Score, baseline: Score) -> str:
    found = compare_scores(score, baseline)
    return "-" if found is None else "{:+.4f} ± {:.4f}".format(*found)


def _format_error(value: float, error: float | None) -> str:
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"
