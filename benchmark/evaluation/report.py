"""A record of evaluations on paper."""

from collections.abc import Mapping
from typing import Any

from benchmark.common.comparison import format_number
from benchmark.common.table import Table
from benchmark.common.variant import BASELINE, OFF
from benchmark.evaluation.scores import Score, compare_scores

NOTE = """\
Score: as lm-evaluation-harness has it, ± its standard error. Difference: to the first policy's, ± the standard error of
the differences document by document; within two errors it says nothing. Tokens/s: output tokens over the time of the
task's requests, one pass, prefix cache emptied before it: `make bench` measures speed. Active experts: means over
layers and steps under policy, counted by the server; before the arrow those of upstream's own routing."""
NO_STEP = "Selected in no step, so that the row shows nothing of the policy"


def tabulate_evaluation(points: Mapping[str, Any]) -> Table:
    """A row a task, metric and policy; a task's first policy is its baseline."""
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
    return "-" if found is None else f"{found.value:+.4f} ± {found.error:.4f}"


def _format_error(value: float, error: float | None) -> str:
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"
