"""Servers that speculate on CPU, and what they must have selected."""

from pathlib import Path

from benchmark.common.speculative import speculative_flags
from served.probe import read_logits
from sglang_xshare import Batch, Router, build_plan, select

DRAFT_TOKENS = 4
TOP_K = 8
CHAIN = (1, 3, DRAFT_TOKENS)
TREES = ((2, 3, 6), (4, 3, 8))
"""Shapes of a draft: --speculative-eagle-topk, -num-steps, -num-draft-tokens."""


def eagle(model: Path, shape: tuple[int, int, int] = CHAIN) -> tuple[str, ...]:
    """The flags of EAGLE-3 with the checkpoint's draft."""
    return speculative_flags(f"{model}-eagle3", *shape)


def experts(active):
    """The numbers of the experts that a mask [experts] has."""
    return active.nonzero().flatten().tolist()


def compute(call, keys, batch, rank_of_expert=None):
    """The reference selection over a recorded call."""
    return select(read_logits(call), build_plan(dict(keys)), Router(TOP_K), batch, rank_of_expert, backend="reference")


def check_verified(calls, routers, choose):
    """Check that verify calls of a model with these routers by layer have selected as the reference does; `choose`
    returns the keys of xshare and the rows' depths of a call. Returns the reference's selections, which drop experts.
    """
    selections = []
    for call in calls:
        assert call["rows"] == call["requests"] * DRAFT_TOKENS
        keys, depth = choose(call)
        batch, plan = Batch(tokens_per_request=DRAFT_TOKENS, depth=depth), build_plan("xshare", **keys)
        selections.append(select(read_logits(call), plan, routers[call["layer"]], batch, backend="reference"))
        assert call["active"] == experts(selections[-1].active)
    assert any(int(one.vanilla_active.sum()) > int(one.active.sum()) for one in selections)
    return selections


def select_again(call, keys, tokens_per_request=1, rank_of_expert=None):
    """The active experts of a policy in a recorded call, by the reference selection."""
    return experts(compute(call, keys, Batch(tokens_per_request=tokens_per_request), rank_of_expert).active)
