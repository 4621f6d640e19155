"""Random batches, routers and plans for the property tests."""

import math
from typing import Any

import torch
from hypothesis import strategies as st

from selection.oracle import ALGORITHMS
from selection.oracle_case import Case
from sglang_xshare import Batch, Router, build_plan, select
from sglang_xshare.policies.plan import BALANCES, SCOPES, UTILITIES
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


EVERY_PLAN = [*ALGORITHMS, "free", "narrow"]
"""What `plans` draws."""
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
        fill_logits(draw(st.sampled_from(KINDS)), rows, experts, seed).to(draw(st.sampled_from(DTYPES))),
        Router(
            k,
            draw(st.sampled_from(SCORINGS)),
            # In eighths: a bias that ties experts as often as it parts them.
            None if bias is None else (torch.randn(experts, generator=generator) * 8 * bias).round() / 8,
            draw(st.booleans()),
            groups,
            None if groups is None else draw(st.integers(1, groups)),
            quota_groups=quota,
            expert_scale=draw(st.sampled_from([None, None, torch.rand(experts, generator=generator) * 4 - 1])),
        ),
        Batch(
            flags(rows, 0.7),
            tokens,
            flags(rows, None, 0.3, 0.3, 0.6, 1.0),
            flags(experts, None, 0.2, 0.5, 0.5, 1.0),
            draw(st.one_of(st.none(), st.integers(1, experts), st.just(2**31 + 1))),
            draw(st.sampled_from([None, draw_depths(rows, tokens, generator)])),
        ),
        torch.randint(4, (experts,), generator=generator).tolist(),
    )


def draw_depths(rows, tokens, generator):
    """[rows] int32, as of trees: a request's first row has 0, a later one up to its place."""
    place = torch.arange(rows) % tokens
    return ((place + 1) * torch.rand(rows, generator=generator)).ceil().clamp_max(place).to(torch.int32)


some = st.fixed_dictionaries
UTILITY = {"utility": st.sampled_from(UTILITIES)}
SHARES = st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.99, 1.0])


def merge(*parts):
    """A strategy for the keys of all parts together."""
    return st.tuples(*parts).map(lambda found: dict(item for keys in found for item in keys.items()))


def maybe(keys):
    return st.one_of(st.just({}), keys)


def add_by_utility(experts):
    """A strategy for the budgets that add experts by utility, each alone or several together."""
    mass = some({"mass": SHARES}, optional={"max_add": st.integers(1, experts + 3)})
    ranks = some({"target_per_rank": st.integers(1, experts), "balance": st.sampled_from(BALANCES)})
    counts = {"add": st.integers(0, experts + 3), "add_per_request": st.sampled_from([0, 0, 1, 3, 9])}
    return merge(some(UTILITY | counts), maybe(mass), maybe(ranks))


def keys_for(policy, case):
    """A strategy for the keys of a policy, over all that the case allows."""
    k, experts = case.top_k, case.num_experts
    warm_up = some({"k0": st.integers(1, k), "p": SHARES})
    budget = {"budget": st.one_of(st.integers(1, 4), st.integers(1, experts + 3))}
    ranked = some(budget | UTILITY | {"scope": st.sampled_from(SCOPES)})
    residence = st.sampled_from([{}, {"free_residents": True}, {"free_residents": False}])
    # A router that does not renormalize refuses the key.
    own_share = some({"own_share": st.sampled_from([0, 0, 0.25, 0.75, 1])}) if case.renormalize else st.just({})
    reach = {
        "kmax": st.just(k) if case.quota_groups else st.integers(k, k + experts),
        "max_rank": st.one_of(st.integers(1, 3), st.integers(1, experts + 3)),
        "target_per_rank": st.integers(1, 9),
    }
    static = {"ranking": st.just("static"), "order": st.permutations(range(experts))}
    voting = {"confidence": SHARES, "max_voters": st.integers(1, 9), "min_votes": st.integers(1, 4)}
    strategies: dict[str, st.SearchStrategy[Any]] = {
        "vanilla": st.just({}),
        "pruned": warm_up,
        "dynamic-skip": some({"beta": st.sampled_from([0, 0.1, 0.5, 0.9, 1])}),
        "xshare": merge(some({"k0": st.integers(0, k), "p": SHARES}), add_by_utility(experts), residence, own_share),
        "oea": merge(warm_up, some({}, optional=reach), residence, own_share),
        "lynx-lat": merge(
            st.one_of(some({"retain": budget["budget"]}), some({"drop": st.integers(0, experts)})), own_share
        ),
        "lynx-acc": merge(some(voting), own_share),
        "moe-spec": st.one_of(
            merge(ranked, own_share),
            merge(ranked, some({"coverage": st.just("truncate"), "rescue": st.booleans()})),
            some(budget | static | {"coverage": st.just("truncate")}),
            merge(some(budget | static), own_share),
        ),
    }
    return strategies[policy]


@st.composite
def free_plans(draw, case):
    """Any plan the algebra allows: the steps of different papers together."""
    k, experts = case.top_k, case.num_experts
    scope = {"scope": st.sampled_from(SCOPES)}
    budgets = st.one_of(
        add_by_utility(experts),
        some({"budget": st.integers(1, experts), "ranking": st.sampled_from(["router", "votes"])} | UTILITY | scope),
        some({"drop": st.integers(0, experts), "ranking": st.just("votes")} | scope),
        st.just({"confidence": 0.3, "min_votes": 1}),
    )
    keys = draw(merge(some({"k0": st.integers(0, k), "p": st.sampled_from([0.3, 0.9, 1.0])}), budgets))
    if keys.get("add") or keys.get("ranking") == "router":
        keys["acceptance"] = draw(st.sampled_from([1.0, 0.7, 0.01]))
    if keys["k0"]:
        keys["warm_rows"] = draw(st.sampled_from([None, 1, 3]))
    if draw(st.booleans()):
        return build_plan("custom", **keys, coverage="truncate", rescue=draw(st.booleans()))
    if case.renormalize:
        keys["own_share"] = draw(st.sampled_from([0, 0.5, 1]))
    kmax = draw(st.integers(k, k if case.quota_groups else k + 3))
    return build_plan("custom", **keys, kmax=kmax, max_rank=draw(st.integers(1, experts)))


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


def run(case, plan, backend):
    """`select` on a case."""
    return select(case.logits, plan, case.router, case.batch, case.rank_of_expert, backend)


def indices(mask):
    return {j for j, is_set in enumerate(mask.tolist()) if is_set}
