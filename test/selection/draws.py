"""Cases with exact rows and plans of every kind, drawn by hypothesis; and rows that are made as wide as others."""

import dataclasses

import torch
from hypothesis import strategies as st

from selection.cases import cases, free_plans, keys_for
from selection.oracle import ALGORITHMS
from sglang_xshare import build_plan


@st.composite
def marked(draw, **sizes):
    """A case with some rows exact: none, few, or all, padding among them."""
    case = draw(cases(**sizes))
    share = draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))
    exact = torch.rand(len(case.P), generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) < share
    return dataclasses.replace(case, exact=exact)


@st.composite
def any_plans(draw, case):
    """A plan of every policy, or a free one; of those some give rows fewer experts than the model's top-k."""
    policy = draw(st.sampled_from([*ALGORITHMS, "free", "narrow"]))
    if policy == "free":
        return draw(free_plans(case))
    if policy == "narrow":
        kmax = case.top_k if case.quota_groups else draw(st.integers(1, case.top_k))
        keys = {"k0": draw(st.integers(0, kmax)), "kmax": kmax, "max_rank": draw(st.sampled_from([None, 1, 3]))}
        return build_plan("custom", **keys, add=draw(st.integers(0, 9)))
    return build_plan(policy, **draw(keys_for(policy, case)))


def pad_columns(rows, columns, value):
    return torch.nn.functional.pad(rows, (0, columns - rows.shape[1]), value=value)
