"""Each paper's algorithm, transcribed literally: plain Python loops over lists, slow, and nothing from the package.

Only the scores P come from torch (softmax, sigmoid and the root of softplus in float32), since no other code rounds
`exp` the same way.
"""

import math
from collections.abc import Callable

from selection.oracle_case import Answer, rank


def fixed(score):
    return round(score * 2**20)


def utility_of(case, rows, kind):
    """Sum of gating scores per expert, in fixed point."""
    scores = [0] * case.num_experts
    for i in rows:
        if i in case.exact_rows:
            continue
        if kind == "full":
            for j in range(case.num_experts):
                scores[j] += fixed(case.M[i][j])
        else:
            total = sum(case.P[i][j] for j in case.top[i])
            for j in case.top[i]:
                if total > 0:
                    share = case.P[i][j] / total
                    scores[j] += fixed(share**2 if kind == "squared" else share)
    return scores


def argmax(candidates, scores):
    """The best candidate with a positive score, or None."""
    best = None
    for e in sorted(candidates):
        if scores[e] > 0 and (best is None or scores[e] > scores[best]):
            best = e
    return best


def add_best(S, scores, candidates, budget):
    for _ in range(budget):
        best = argmax(candidates - S, scores)
        if best is None:
            break
        S.add(best)


def each(case, choose):
    """The experts of every row: as `choose` has it, of an exact row its own top-k, of padding none."""
    experts = [case.top[i] if i in case.exact_rows else [] for i in range(len(case.P))]
    for i in case.others:
        experts[i] = choose(i)
    return experts


def refine(case, S):
    """XShare's refinement: every token routes to its top-k within S."""
    return each(case, lambda i: case.take(rank(S, case.C[i])))


def vanilla(case):
    experts = each(case, lambda i: case.top[i])
    return Answer(set().union(*experts), experts)


def warm_up_of(case, i, k0, p):
    """OEA, Algorithm 2, lines 4-6."""
    total = sum(fixed(x) for x in case.M[i])
    t = 0
    reached = 0
    while t < min(k0, len(case.top[i])):
        reached += fixed(case.M[i][case.top[i][t]])
        t += 1
        if p < 1 and reached >= math.ceil(p * total):
            break
    return case.top[i][:t]


def xshare(
    case, k0=1, p=1.0, utility="topk", add=0, add_per_request=0, mass=None, max_add=None, free_residents=None, **ranks
):
    """XShare, Algorithms 2, 4 and 6; Algorithm 1 with `mass` as a threshold. Ours: its cap, `max_add`; and only
    what is not loaded counts.
    """
    everyone = set(range(case.num_experts))
    free = case.free(free_residents)
    paid = everyone - (free or set())
    S_batch = case.held()
    for rows in case.requests():
        S_request = case.held(rows)
        for i in rows:
            if i in case.others:
                S_request |= set(warm_up_of(case, i, k0, p))
        warm = set(S_request)
        scores = utility_of(case, rows, utility)
        add_best(S_request, scores, paid - warm, add_per_request)
        S_batch |= S_request
    scores = utility_of(case, case.rows, utility)
    first = set(S_batch)
    add_best(S_batch, scores, paid, add)
    if mass is not None:
        added = 0
        while sum(scores[e] for e in S_batch | (everyone - paid)) < math.ceil(mass * sum(scores)) and added != max_add:
            S_batch.add(argmax(paid - S_batch, scores))
            added += 1
    complete(case, first, S_batch, scores, free, **ranks)
    return Answer(S_batch, refine(case, S_batch))


def complete(case, first, S, scores, free, target_per_rank=None, balance="literal"):
    """What joins S last: experts of each rank, and residents."""
    if target_per_rank is not None:
        gpu_aware_greedy(case, S, scores, target_per_rank, balance)
    if free is not None:
        let_residents_join(case, first, S, scores, free)


def let_residents_join(case, first, S, scores, free):
    """Ours: what rows or requests brought has a slot, then the others of S, then residents, best first."""
    added = S - first
    S &= first
    for candidates in (added, free):
        add_best(S, scores, candidates, (case.slots or case.num_experts) - len(S))


def gpu_aware_greedy(case, S, scores, m_g, balance):
    """XShare, Algorithm 5; or our `fill`, where each rank stops at its own target; or our `level`, where it stops at
    what the fullest has where that is more.
    """
    G = max(case.rank_of_expert) + 1
    E = [{e for e in range(case.num_experts) if case.rank_of_expert[e] == g} for g in range(G)]
    free = case.held()
    if balance == "level":
        m_g = max(m_g, max(len(S & E[g]) for g in range(G)))
    if balance in ("fill", "level"):
        for g in range(G):
            add_best(S, scores, E[g], m_g - len((S - free) & E[g]))
        return
    while len(S - free) < m_g * G:
        before = len(S)
        for g in range(G):
            add_best(S, scores, E[g], 1)
        if len(S) == before:
            break


def oea(case, k0, p=1.0, kmax=None, max_rank=None, target_per_rank=None, free_residents=None):
    """OEA, Algorithm 2. Its break test lets one expert too many through; the text's exact kmax is meant."""
    kmax = kmax or case.top_k
    base = each(case, lambda i: warm_up_of(case, i, k0, p))
    S_base = set().union(*base)
    scores = utility_of(case, case.rows, "topk")
    complete(case, set(S_base), S_base, scores, case.free(free_residents), target_per_rank, "level")

    def piggyback(i):
        S_i, reach = list(base[i]), case.ranking[i][:max_rank]
        if case.quota_groups:
            return case.take(rank({*S_i, *(S_base & set(reach))}, case.C[i]))
        for j in reach[len(S_i) :]:
            if len(S_i) < kmax and j in S_base:
                S_i.append(j)
        return S_i

    return Answer(S_base, each(case, piggyback))


def pruned(case, k0, p=1.0):
    experts = each(case, lambda i: warm_up_of(case, i, k0, p))
    return Answer(set().union(*experts), experts)


def dynamic_skip(case, beta):
    """NAEE: an expert after the first is skipped where it scores less than beta times the first."""

    def keep(i):
        top = case.top[i]
        return [j for j in top if j == top[0] or not case.P[i][j] < beta * case.P[i][top[0]]]

    experts = each(case, keep)
    return Answer(set().union(*experts), experts)


def votes_of(case, rows):
    votes = [0] * case.num_experts
    for i in rows:
        for j in case.top[i]:
            votes[j] += i not in case.exact_rows
    return votes


def lynx_lat(case, retain=None, drop=None):
    """Lynx 4.2: all tokens vote for their top-k; the least voted experts go."""
    votes = votes_of(case, case.rows)
    scores = utility_of(case, case.rows, "full")
    known = [j for j in range(case.num_experts) if (votes[j] > 0 or scores[j] > 0) and j not in case.held()]
    best_first = sorted(known, key=lambda j: (-votes[j], -scores[j], j))
    if drop is not None:
        retain = len([j for j in known if votes[j] > 0]) - drop
    S = case.held() | set(best_first[: max(retain, case.top_k)])
    return Answer(S, refine(case, S))


def lynx_acc(case, confidence, max_voters=8, min_votes=2):
    """Lynx 4.3: only confident tokens vote."""
    scores = {i: [fixed(x) for x in case.M[i]] for i in case.others}
    confidences = {i: max(row) / sum(row) if sum(row) else 0.0 for i, row in scores.items()}
    by_confidence = sorted(case.others, key=lambda i: (-confidences[i], i))
    sure = [i for i in by_confidence if sum(scores[i]) > 0 and max(scores[i]) >= math.ceil(confidence * sum(scores[i]))]
    voters = sure[:max_voters] or by_confidence[:1]
    votes = votes_of(case, voters)
    S = case.held() | {j for j in range(case.num_experts) if votes[j] >= min_votes}
    for i in voters:
        S |= set(case.top[i][:1])
    add_best(S, utility_of(case, case.rows, "full"), set(range(case.num_experts)), max(case.top_k - len(S), 0))
    return Answer(S, refine(case, S))


def moe_spec(
    case, budget, ranking="router", utility="full", order=None, coverage="substitute", rescue=True, scope="batch"
):
    """MoE-Spec, Algorithm 1, for the whole draft batch or for each request."""
    S = case.held()
    for rows in case.requests() if scope == "request" else [case.rows]:
        if ranking == "static":
            S |= set([j for j in order if j not in case.held(rows)][:budget])
        else:
            add: set[int] = set()
            add_best(add, utility_of(case, rows, utility), set(range(case.num_experts)) - case.held(rows), budget)
            S |= add
    if coverage == "substitute":
        return Answer(S, refine(case, S))
    rescued = 0
    if rescue:
        lost = [i for i in case.rows if case.top[i] and not S & set(case.top[i])]
        S |= {case.top[i][0] for i in lost}
        rescued = len(lost)
    return Answer(S, each(case, lambda i: [j for j in case.top[i] if j in S]), rescued, whole=case.top)


ALGORITHMS: dict[str, Callable[..., Answer]] = {
    policy.__name__.replace("_", "-"): policy
    for policy in (vanilla, pruned, dynamic_skip, xshare, oea, lynx_lat, lynx_acc, moe_spec)
}
