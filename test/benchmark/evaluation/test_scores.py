"""Scores out of what the harness returns, and differences paired by document."""

from itertools import pairwise

import pytest

from benchmark.common.paths import TEXTS
from benchmark.evaluation.report import Score, compare_scores, read_scores, tabulate_evaluation
from benchmark.evaluation.tasks.sums import load_sums

SUMS = {
    **{"alias": "sums", "sample_len": 3, "exact_match,number": 2 / 3, "exact_match_stderr,number": 0.33},
    **{"ppl,none": 4.0, "ppl_stderr,none": "N/A"},
}
SAMPLES = [
    *({"doc_id": doc, "filter": "number", "exact_match": match} for doc, match in ((2, 0.0), (0, 1.0), (1, 1.0))),
    {"doc_id": 0, "filter": "none", "ppl": (3.0, 7)},
]


def score(*documents, value=None):
    return Score("sums", "exact_match", sum(documents) / len(documents) if value is None else value, 0.1, [*documents])


def test_scores_of_every_metric_by_document():
    match, ppl = read_scores({"results": {"sums": SUMS}, "samples": {"sums": SAMPLES}})
    assert match == Score("sums", "exact_match, number", 2 / 3, 0.33, [1.0, 1.0, 0.0])
    assert ppl == Score("sums", "ppl", 4.0, None, []), "a tuple a document is no value of it, N/A no error"


def test_differences_are_paired():
    """Of four documents one is lost: -1/4, and the differences 0, 0, 0, -1 have a deviation of 1/2."""
    assert compare_scores(score(1, 0, 1, 0), score(1, 0, 1, 1)) == (-0.25, 3.182 * 0.25)
    assert compare_scores(score(1, 0, 1), score(1, 0, 1)) == (0, 0)


@pytest.mark.parametrize("other", [score(1, 0), score(1, 0, 1, value=9.0), Score("sums", "ppl", 1.0, None, [])])
def test_no_difference_where_documents_do_not_tell_the_value(other):
    assert compare_scores(score(1, 0, 1), other) is None
    assert compare_scores(other, other if other.value == 9 else score(1, 0, 1)) is None


def test_a_row_a_policy_beside_the_first():
    told = {"experts_before": 24.0, "experts_after": 20.5, "kept_mass": 0.98765, "policy_steps": 7}
    points = {
        policy: {"task": "sums", "policy": policy, "scores": [vars(one)], "tokens": 30, "seconds": 2.0, **told}
        for policy, one in (("off", score(1, 1, 1, 1)), ("xshare", score(1, 1, 1, 0)))
    }
    row = ["sums, exact_match", "xshare", "0.7500 ± 0.1000", "-0.2500 ± 0.7955", "4", "15.0", "24.0 -> 20.5", "0.988"]
    assert tabulate_evaluation(points).rows[1] == row


def test_a_sum_stands_after_a_solved_one():
    rows, lines = load_sums()["test"], (TEXTS / "arithmetic.txt").read_text().splitlines()
    asked = [f"{row['question']} {row['answer']}" for row in rows]
    assert asked == [f"{solved}\n{line}" for solved, line in pairwise(lines)]
