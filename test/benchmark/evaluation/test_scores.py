"""Scores out of what the harness returns, differences paired by document, and the table of a record."""

import pytest

from benchmark.evaluation.report import Score, compare_scores, read_scores, tabulate_evaluation

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


def arm(policy, *documents, **figures):
    told = {"experts_before": None, "experts_after": None, "kept_mass": None, "policy_steps": 0} | figures
    fields = vars(score(*documents))
    return {"task": "sums", "policy": policy, "scores": [fields], "tokens": 30, "seconds": 2.0, **told}


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
    on = {"experts_before": 24.0, "experts_after": 20.5, "kept_mass": 0.98765, "policy_steps": 7}
    points = {"a": arm("off", 1, 1, 1, 1), "b": arm("xshare", 1, 1, 1, 0, **on), "c": arm("oea:k0=3", 1, 1, 1, 1)}
    table = tabulate_evaluation(points)
    assert table.rows == [
        ["sums, exact_match", "off", "1.0000 ± 0.1000", "", "4", "15.0", "-", "-"],
        ["sums, exact_match", "xshare", "0.7500 ± 0.1000", "-0.2500 ± 0.7955", "4", "15.0", "24.0 -> 20.5", "0.988"],
        ["sums, exact_match", "oea:k0=3", "1.0000 ± 0.1000", "+0.0000 ± 0.0000", "4", "15.0", "-", "-"],
    ]
    assert table.note.endswith("nothing of the policy: oea:k0=3.")
