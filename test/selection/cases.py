"""Random batches, routers and plans for the property tests."""

import math
from typing import Any

import torch
from hypothesis import strategies as st

from selection.oracle import ALGORITHMS
from selection.oracle_case import Case
from sglang_xshare import Batch, Router, build_plan, select
from sglang_xshare.policies.plan import BALANCES
from sglang_xshare.policies.spelling import parse_policy
from sglang_xshare.types import SCORINGS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Values that meet every special case: ties, both zeros, underflow, and what counts as -inf.
SPECIAL = [0.0, -0.0, 1.0, 1.5, -2.0, 90.0, -90.0, 1e4, -1e4, math.inf, -math.inf, math.nan]


def fill_logits(kind, rows, experts, seed):
    """[rows, experts] float32 of one of the kinds in KINDS."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, experts, generator=generator)
    share = torch.rand(rows, experts, generator=generator)
    if kind == "ties":
        return (normal * 1.5).round()
    if kind == "wide":
        return normal * 40
    if kind == "huge":
        return torch.where(share < 0.5, 1e4, -1e4)
    if kind == "equal":
        return torch.full((rows, experts), [0.0, 1e4, -1e4][seed % 3])
    if kind == "special":
        return torch.tensor(SPECIAL)[(share * len(SPECIAL)).long()]
    if kind == "dead rows":
        return normal.masked_fill(share[:, :1] < 0.3, -math.inf).masked_fill(share < 0.2, math.nan)
    return normal


OWN_SHARES = ("xshare", "oea", "lynx-lat", "lynx-acc", "moe-spec")
"""Policies that take `own_share`."""
EVERY_PLAN = [*ALGORITHMS, "free", "narrow"]
"""What `plans` draws."""
RESIDENCE = [{"free_residents": True}, {"free_residents": False}]
KINDS = ["normal", "ties", "wide", "huge", "equal", "special", "dead rows"]


@st.composite
def cases(draw, max_requests=6, max_experts=64, max_tokens=8):
    """A `Case` of up to `max_requests * max_tokens` rows: some padding, some exact, some experts resident in slots."""
    experts = draw(st.sampled_from([n for n in (8, 12, 16, 32, 64, 128, 256, 512) if n <= max_experts]))
    tokens = draw(st.integers(1, max_tokens))
    rows = tokens * draw(st.integers(1, max(max_requests, 1)))
    seed = draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed + 1)
    bias = draw(st.sampled_from([None, None, 0.1, 1.0]))
    groups = draw(st.sampled_from([None, None, 2, 4]))
    quota = draw(st.sampled_from([None, None, 2, 4])) if groups is None else None
    k = draw(st.integers(1, min(16, experts)))
    if quota and k % quota:
        quota = None

    def flags(size, *shares):
        share = draw(st.sampled_from([None, *shares]))
        return None if share is None else torch.rand(size, generator=generator) < share

    return Case(
        logits=fill_logits(draw(st.sampled_from(KINDS)), rows, experts, seed).to(draw(st.sampled_from(DTYPES))),
        top_k=k,
        scoring=draw(st.sampled_from(SCORINGS)),
        # In eighths: a bias that ties experts as often as it parts them.
        bias=None if bias is None else (torch.randn(experts, generator=generator) * 8 * bias).round() / 8,
        renormalize=draw(st.booleans()),
        num_expert_group=groups,
        topk_group=None if groups is None else draw(st.integers(1, groups)),
        valid=flags(rows, 0.7),
        tokens_per_request=tokens,
        rank_of_expert=torch.randint(4, (experts,), generator=generator).tolist(),
        quota_groups=quota,
        expert_scale=draw(st.sampled_from([None, None, torch.rand(experts, generator=generator) * 4 - 1])),
        exact=flags(rows, None, 0.3, 0.3, 0.6, 1.0),
        resident=flags(experts, None, 0.2, 0.5, 0.5, 1.0),
        slots=draw(st.one_of(st.none(), st.integers(1, experts))),
        depth=draw(st.sampled_from([None, draw_depths(rows, tokens, generator)])),
    )


def draw_depths(rows, tokens, generator):
    """[rows] int32, as of trees: a request's first row has 0, a later one up to its place."""
    place = torch.arange(rows) % tokens
    return ((place + 1) * torch.rand(rows, generator=generator)).ceil().clamp_max(place).to(torch.int32)


def keys_for(policy, case):
    """A strategy for the keys of a policy, over all that the case allows."""
    k, experts = case.top_k, case.num_experts
    shares = st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.99, 1.0])
    warm_up = {"k0": st.integers(1, k), "p": shares}
    utility = st.sampled_from(["topk", "full", "squared"])
    wider = {"k0": st.integers(0, k), "utility": utility}
    budget = st.integers(1, experts + 3)
    ranked = {"budget": budget, "scope": st.sampled_from(["batch", "request"]), "utility": utility}
    some = st.fixed_dictionaries
    strategies: dict[str, st.SearchStrategy[Any]] = {
        "vanilla": st.just({}),
        "pruned": some(warm_up),
        "dynamic-skip": some({"beta": st.sampled_from([0, 0.1, 0.5, 0.9, 1])}),
        "xshare": st.one_of(
            some({**wider, "p": shares, "add": st.integers(0, experts + 3)}),
            some({**wider, "add": st.integers(0, 9), "add_per_request": st.integers(1, 9)}),
            some({**wider, "mass": shares}, optional={"max_add": st.integers(1, experts + 3)}),
            some({**wider, "target_per_rank": st.integers(1, experts), "balance": st.sampled_from(BALANCES)}),
            some(
                {**wider, "add": st.integers(0, 5), "add_per_request": st.integers(0, 3), "mass": shares}
                | {"target_per_rank": st.integers(1, 5)},
                optional={"max_add": st.integers(1, 5)},
            ),
        ),
        "oea": some(
            warm_up,
            optional={
                "kmax": st.just(k) if case.quota_groups else st.integers(k, k + experts),
                "max_rank": st.integers(1, experts + 3),
                "target_per_rank": st.integers(1, 9),
            },
        ),
        "lynx-lat": st.one_of(some({"retain": budget}), some({"drop": st.integers(0, experts)})),
        "lynx-acc": some({"confidence": shares, "max_voters": st.integers(1, 9), "min_votes": st.integers(1, 4)}),
        "moe-spec": st.one_of(
            some(ranked),
            some({**ranked, "coverage": st.just("truncate"), "rescue": st.booleans()}),
            some(
                {"budget": budget, "ranking": st.just("static"), "order": st.permutations(range(experts))}
                | {"coverage": st.sampled_from(["substitute", "truncate"])}
            ),
        ),
    }
    found = strategies[policy]
    if policy in ("xshare", "oea"):
        found = st.builds(lambda keys, free: {**keys, **free}, found, st.sampled_from([{}, *RESIDENCE]))
    if policy not in OWN_SHARES or not case.renormalize:  # which refuse the key
        return found
    return st.builds(add_own_share, found, st.sampled_from([0, 0, 0.25, 0.75, 1]))


def add_own_share(keys, share):
    return {**keys, "own_share": share} if share and keys.get("coverage") != "truncate" else keys


@st.composite
def free_plans(draw, case):
    """Any plan the algebra allows: the steps of different papers together."""
    k, experts = case.top_k, case.num_experts
    keys = {"k0": draw(st.integers(0, k)), "p": draw(st.sampled_from([0.3, 0.9, 1.0]))}
    budget = {"budget": draw(st.integers(1, experts)), "scope": draw(st.sampled_from(["batch", "request"]))}
    drop = {"drop": draw(st.integers(0, experts)), "scope": draw(st.sampled_from(["batch", "request"]))}
    keys |= draw(
        st.sampled_from(
            [
                {"add": 3, "add_per_request": 2, "mass": 0.4, "target_per_rank": 2, "balance": "fill"},
                {"mass": 0.9, "max_add": draw(st.integers(1, experts + 3))},
                {"utility": "full", "add_per_request": 1, "target_per_rank": 3},
                {"add": 2, "target_per_rank": 1, "balance": "level"},
                {**budget, "utility": draw(st.sampled_from(["topk", "full", "squared"]))},
                {**budget, "ranking": "votes"},
                {**drop, "ranking": "votes"},
                {"confidence": 0.3, "min_votes": 1},
            ]
        )
    )
    if "confidence" not in keys and keys.get("ranking") != "votes":
        keys["acceptance"] = draw(st.sampled_from([1.0, 0.7, 0.01]))
    if keys["k0"]:
        keys["warm_rows"] = draw(st.sampled_from([None, 1, 3]))
    wider = k if case.quota_groups else k + 3
    if draw(st.booleans()):
        return build_plan("custom", **keys, coverage="truncate", rescue=draw(st.booleans()))
    if case.renormalize:
        keys["own_share"] = draw(st.sampled_from([0, 0.5, 1]))
    return build_plan("custom", **keys, kmax=draw(st.integers(k, wider)), max_rank=draw(st.integers(1, experts)))


@st.composite
def plans(draw, case, policy):
    """A plan of a policy, a "free" one of the algebra, or a "narrow" one with rows of fewer experts than top-k."""
    if policy == "free":
        return draw(free_plans(case))
    if policy == "narrow":
        kmax = case.top_k if case.quota_groups else draw(st.integers(1, case.top_k))
        keys = {"k0": draw(st.integers(0, kmax)), "kmax": kmax, "max_rank": draw(st.sampled_from([None, 1, 3]))}
        return build_plan("custom", **keys, add=draw(st.integers(0, 9)))
    return build_plan(policy, **draw(keys_for(policy, case)))


def spell(text):
    """Return the plan of a policy as a command line spells it."""
    name, keys = parse_policy(text)
    return build_plan(name, **keys)


def words(text):
    """Return the words of a text, such as plans that are spelled one after the other."""
    return text.split()


def pad_columns(rows, columns, value):
    return torch.nn.functional.pad(rows, (0, columns - rows.shape[1]), value=value)


def router_of(case):
    groups = case.num_expert_group, case.topk_group
    more = {"quota_groups": case.quota_groups, "expert_scale": case.expert_scale}
    return Router(case.top_k, case.scoring, case.bias, case.renormalize, *groups, **more)


def batch_of(case):
    return Batch(case.valid, case.tokens_per_request, case.exact, case.resident, case.slots, case.depth)


def run(case, plan, backend):
    """`select` on a case."""
    return select(case.logits, plan, router_of(case), batch_of(case), case.rank_of_expert, backend)


def indices(mask):
    return {j for j, is_set in enumerate(mask.tolist()) if is_set}
