"""Rows of a verify step weighed by the chance that their draft is accepted: `acceptance`, `warm_rows`, `Batch.depth`.

The drawn cases of test_backends.py contain them with all other keys.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selection.cases import cases, indices, plans, run, spell
from selection.compared import HERE, compare
from sglang_xshare import Batch, Router, build_plan
from sglang_xshare.policies.schedule import build_schedule


def rows_that_want(*experts, others=8):
    """Logits of rows that each want one expert, and no other nearly as much."""
    logits = torch.full((len(experts), others), -4.0) - torch.arange(others) / 64
    logits[torch.arange(len(experts)), list(experts)] = 4.0
    return logits


DRAFTS = rows_that_want(0, 1, 5, 5)
TWO = rows_that_want(0, 1, 5, 6, 2, 3, 5, 6)


@pytest.mark.parametrize(
    ("logits", "text", "depth", "expected"),
    [
        # Two late drafts outvote the first row while all count alike, and no more once half of each is accepted.
        (DRAFTS, "xshare:k0=0,add=1", None, {5}),
        (DRAFTS, "xshare:k0=0,add=1,acceptance=0.5", None, {0}),
        (DRAFTS, "xshare:k0=0,add=2,acceptance=0.5", None, {0, 1}),  # 1/4 + 1/8 against 1/2 of the second row
        (DRAFTS, "xshare:k0=0,add=2,acceptance=0.9", None, {0, 5}),
        # A tree says how deep its drafts are: the same rows as siblings follow on the first alone.
        (DRAFTS, "xshare:k0=0,add=2,acceptance=0.6", None, {0, 1}),
        (DRAFTS, "xshare:k0=0,add=2,acceptance=0.6", [0, 1, 2, 3], {0, 1}),
        (DRAFTS, "xshare:k0=0,add=2,acceptance=0.6", [0, 1, 1, 1], {0, 5}),
        # Only the first rows bring their warm-up.
        (TWO, "xshare:k0=1,add=0", None, {0, 1, 2, 3, 5, 6}),
        (TWO, "xshare:k0=1,add=0,warm_rows=2", None, {0, 1, 2, 3}),
        (TWO, "xshare:k0=1,add=0,warm_rows=1", None, {0, 2}),
        # A request adds by its weighed utility.
        (rows_that_want(0, 1, 5, 5, 2, 3, 6, 6), "xshare:k0=0,add=0,add_per_request=1", None, {5, 6}),
        (rows_that_want(0, 1, 5, 5, 2, 3, 6, 6), "xshare:k0=0,add=0,add_per_request=1,acceptance=0.5", None, {0, 2}),
        # Mass is a share of the weighed total.
        (rows_that_want(0, 1, 2, 3), "xshare:k0=0,mass=0.7", None, {0, 1, 2}),
        (rows_that_want(0, 1, 2, 3), "xshare:k0=0,mass=0.7,acceptance=0.5", None, {0, 1}),
    ],
)
def test_s_of_drafts(backend, logits, text, depth, expected):
    depth = None if depth is None else torch.tensor(depth, dtype=torch.int32, device=backend.device)
    batch = Batch(tokens_per_request=4, depth=depth)
    found = compare(backend, logits.to(backend.device), spell(text), Router(2), batch)
    assert indices(found.selected) == expected


def test_a_first_row_is_weighed_too(backend):
    """By 1, as a float32: shares that it cannot tell apart are equal, on every backend."""
    logits = torch.full((2, 8), -30.0)
    logits[0, :2] = torch.tensor([2.0, 2.000002])
    plan = build_plan("custom", k0=0, add=1, utility="full", acceptance=1e-6)
    compare(backend, logits.to(backend.device), plan, Router(1, "sqrtsoftplus"), Batch(tokens_per_request=2))


@pytest.mark.parametrize("keys", [{"acceptance": 0.5}, {"warm_rows": 1}])
def test_without_speculation_there_are_no_drafts(keys):
    name = next(iter(keys))
    with pytest.raises(ValueError, match=f"{name} = .*: must be used with speculative decoding"):
        build_schedule("xshare", {"k0": 1, "add": 8, **keys}, speculative=False)
    assert build_schedule("xshare", {"k0": 1, "add": 8, **keys}, speculative=True) is not None


@pytest.mark.parametrize("backend", HERE, indirect=True)
def test_depths_beyond_the_table_count_as_its_last(backend):
    @backend.settle(40)
    @given(data=st.data())
    def check(data):
        case = data.draw(cases(max_tokens=4))
        plan = data.draw(plans(case, "free"))
        for one, other in ((255, 10_000), (0, -7), (255, 2**31 - 1)):
            depths = [torch.full((len(case.P),), depth, dtype=torch.int32) for depth in (one, other)]
            first, second = (run(case.but(depth=depth), plan, backend.name) for depth in depths)
            assert torch.equal(first.selected, second.selected)

    check()
