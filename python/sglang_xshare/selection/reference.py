"""The reference backend: selection in plain torch and loops, as docs/selection.md defines it.

Every other backend returns the same ids. The code always runs on the CPU. It handles one row and one expert at a time,
so it is for tests, not for serving. docs/selection.md explains the symbols C, P and S.
"""

import math

import torch

from ..policies.plan import SelectionPlan
from ..types import Batch, Router, Selection
from .handled import FULL
from .scores import DEPTHS, compute_scores, measure, to_fixed_point, weigh_depths

HANDLED = FULL
"""The reference reads all keys and words of a plan. Add a new key or word here first."""


def select(
    logits: torch.Tensor,
    plan: SelectionPlan,
    router: Router,
    batch: Batch,
    rank_of_expert: torch.Tensor | None,
) -> Selection:
    """Select the batch's experts and each row's experts; see `sglang_xshare.selection.select`."""
    return _Reference(logits, plan, router, batch, rank_of_expert).select()


class _Reference:
    def __init__(
        self,
        logits: torch.Tensor,
        plan: SelectionPlan,
        router: Router,
        batch: Batch,
        rank_of_expert: torch.Tensor | None,
    ) -> None:
        self.plan, self.router, self.device = plan, router, logits.device
        scores, choice = compute_scores(logits, router)
        self.scores, choice = scores.cpu(), choice.cpu()
        # Gemma 4 multiplies the softmax over the chosen logits by a factor for each expert (SGLang's
        # models/gemma4_causal.py).
        scale = torch.ones(logits.shape[1]) if router.expert_scale is None else router.expert_scale
        self.expert_scale = scale.detach().float().cpu()
        self.measures = measure(self.scores, router)
        self.fixed = to_fixed_point(self.measures).long().tolist()
        self.num_rows, self.num_experts = choice.shape
        valid = [True] * self.num_rows if batch.valid is None else batch.valid.tolist()
        exact = [False] * self.num_rows if batch.exact is None else batch.exact.tolist()
        self.rows = [i for i in range(self.num_rows) if valid[i]]
        self.exact = {i for i in self.rows if exact[i]}
        # The loaded experts that no budget counts. None if the plan's budgets count loaded experts.
        resident = batch.resident if plan.takes_residents else None
        self.resident = None if resident is None else {j for j, there in enumerate(resident.tolist()) if there}
        self.slots = batch.slots or logits.shape[1]
        self.columns = plan.columns(router, exact=batch.exact is not None)
        size = batch.tokens_per_request
        self.depth = [i % size for i in range(self.num_rows)] if batch.depth is None else batch.depth.tolist()
        self.chance = weigh_depths(plan.acceptance) if plan.weighs(size) else None
        self.requests = [[i for i in range(r, r + size) if valid[i]] for r in range(0, self.num_rows, size)]
        self.rank_of_expert = None if rank_of_expert is None else rank_of_expert.tolist()
        # The experts of each row, best first by C. The lower id wins a tie. An expert with C = -inf is never chosen.
        self.ranking = [
            [j for j in sorted(range(self.num_experts), key=lambda j: (-row[j], j)) if row[j] > -math.inf]
            for row in choice.tolist()
        ]
        self.top_k = [self.take(ranked) for ranked in self.ranking]

    def take(self, ranked: list[int], count: int | None = None) -> list[int]:
        """Return the first `count` experts of `ranked`. If `count` is None, return as many as the model's top-k.

        The router of InternS1-Pro chooses experts in each group (SGLang's models/interns1pro.py). For such a router,
        return only experts that are among the first top_k / groups experts of their group.
        """
        groups = self.router.quota_groups
        if groups is not None:
            parts = [[j for j in ranked if j * groups // self.num_experts == group] for group in range(groups)]
            ranked = [j for j in ranked if any(j in part[: self.router.top_k // groups] for part in parts)]
        return ranked[: count or self.router.top_k]

    def select(self) -> Selection:
        self.kept = {i: self.keep(i) for i in self.rows}
        selected = self.select_experts()
        chosen, rescued = self.cover_rows(selected)
        ids = torch.full((self.num_rows, self.columns), -1, dtype=torch.int32)
        weights = torch.zeros(self.num_rows, self.columns)
        kept_mass = torch.zeros(self.num_rows)
        for i, experts in chosen.items():
            ids[i, : len(experts)] = torch.tensor(experts, dtype=torch.int32)
            weights[i, : len(experts)] = self.weigh(i, experts) * self.expert_scale[experts]
            share = self.scores[i, experts].sum() / self.scores[i, self.top_k[i]].sum()
            kept_mass[i] = torch.nan_to_num(share, nan=1.0, posinf=1.0)
        return Selection(
            topk_ids=ids.to(self.device),
            topk_weights=weights.to(self.device),
            selected=self.mask(selected),
            active=self.mask(set().union(*chosen.values())),
            rescued=torch.tensor(rescued, device=self.device),
            vanilla_active=self.mask(set().union(*(self.top_k[i] for i in self.rows))),
            kept_mass=kept_mass.to(self.device),
        )

    # Select: the set S.

    def keep(self, i: int) -> list[int]:
        """Return the experts that row `i` always keeps. This is its warm-up without the experts skipped by `beta`.

        An exact row keeps its own top-k.
        """
        if i in self.exact:
            return self.top_k[i]
        if self.plan.warm_rows is not None and self.depth[i] >= self.plan.warm_rows:
            return []
        k0 = self.router.top_k if self.plan.k0 is None else self.plan.k0
        kept = self.top_k[i][:k0]
        if self.plan.p < 1:
            reach = math.ceil(self.plan.p * sum(self.fixed[i]))
            ranked, kept = kept, []
            for j in ranked:
                kept.append(j)
                if sum(self.fixed[i][expert] for expert in kept) >= reach:
                    break
        if self.plan.beta is not None:
            floor = self.plan.beta * self.scores[i, kept[0]].item() if kept else 0.0
            kept = [j for rank, j in enumerate(kept) if rank == 0 or self.scores[i, j].item() >= floor]
        return kept

    def select_experts(self) -> set[int]:
        """Return S as it is before rows are rescued."""
        selected = set().union(*self.kept.values())
        if self.plan.ranks_experts:
            groups = self.requests if self.plan.scope == "request" else [self.rows]
            return selected.union(*(self.rank_experts(rows) for rows in groups))
        if self.plan.confidence is not None:
            return selected | self.follow_voters(self.plan.confidence, selected)
        free = self.resident or set()
        for rows in self.requests:
            rest = self.best(self.utility(rows), without=free.union(*(self.kept[i] for i in rows)))
            selected = selected.union(rest[: self.plan.add_per_request])
        sure = selected
        utility = self.utility(self.rows)
        selected = selected.union(self.best(utility, without=selected | free)[: self.plan.add])
        if self.plan.mass is not None:
            for expert in self.best(utility, without=selected | free)[: self.plan.max_add]:
                if sum(utility[j] for j in selected | free) >= math.ceil(self.plan.mass * sum(utility)):
                    break
                selected = selected | {expert}
        if self.plan.target_per_rank is not None:
            selected = self.balance(selected, utility, self.plan.target_per_rank)
        return selected if self.resident is None else self.fill_with_residents(sure, selected, utility)

    def fill_with_residents(self, sure: set[int], selected: set[int], utility: list[int]) -> set[int]:
        """Return S for paged experts. S has at most `slots` experts, unless `sure` alone has more.

        The experts in `sure`, which rows and requests have added, come first. Then come the experts that the batch has
        added, and then other loaded experts. The last two groups are ordered by utility.
        """
        assert self.resident is not None
        ranked = [j for j in self.best(utility, without=sure) if j in selected]
        ranked += [j for j in self.best(utility, without=selected) if j in self.resident]
        return sure.union(ranked[: max(self.slots - len(sure), 0)])

    def exact_experts(self, rows: list[int]) -> set[int]:
        """Return the experts of the exact rows among `rows`. No budget counts these experts."""
        return set().union(*(self.top_k[i] for i in rows if i in self.exact))

    def utility(self, rows: list[int], kind: str | None = None) -> list[int]:
        """Return the utility of every expert over `rows`, in fixed point. Exact rows have no utility.

        By default the plan decides the kind of utility, and each row is weighed by its depth. If `kind` is given, the
        result is the utility of this kind without weights for depths.
        """
        total = [0] * self.num_experts
        for i in [i for i in rows if i not in self.exact]:
            experts, shares = self.top_k[i], self.scores[i, self.top_k[i]].double()
            if (kind or self.plan.utility) == "full":
                experts, shares = list(range(self.num_experts)), self.measures[i]
            elif shares.sum() > 0:
                shares = shares / shares.sum()
                shares = shares**2 if (kind or self.plan.utility) == "squared" else shares
            if kind is None and self.chance is not None:
                shares = shares.float() * self.chance[min(max(self.depth[i], 0), DEPTHS - 1)]
            for j, score in zip(experts, to_fixed_point(shares).long().tolist(), strict=True):
                total[j] += score
        return total

    def best(self, utility: list[int], without: set[int]) -> list[int]:
        """Return the experts that have utility and are not in `without`, best first."""
        rest = [j for j in range(self.num_experts) if j not in without and utility[j] > 0]
        return sorted(rest, key=lambda j: (-utility[j], j))

    def balance(self, selected: set[int], utility: list[int], target: int) -> set[int]:
        assert self.rank_of_expert is not None
        ranks = max(self.rank_of_expert) + 1
        home = self.rank_of_expert
        exact_experts = self.exact_experts(self.rows)
        if self.plan.balance in ("fill", "level"):
            loads = [sum(home[j] == rank for j in selected - exact_experts) for rank in range(ranks)]
            # Exact rows count here, because the step waits for the fullest rank.
            if self.plan.balance == "level":
                target = max(target, *(sum(home[j] == rank for j in selected) for rank in range(ranks)))
            for rank in range(ranks):
                own = [j for j in self.best(utility, without=selected) if home[j] == rank]
                selected = selected.union(own[: max(target - loads[rank], 0)])
            return selected
        while len(selected - exact_experts) < target * ranks:
            added: dict[int, int] = {}
            for j in self.best(utility, without=selected):
                added.setdefault(home[j], j)  # each rank's best remaining expert
            if not added:
                break
            selected = selected.union(added.values())
        return selected

    def rank_experts(self, rows: list[int]) -> set[int]:
        """Return the best experts of the plan's ranking over `rows`. The experts of exact rows are not ranked."""
        plan, exact_experts = self.plan, self.exact_experts(rows)
        if plan.ranking == "static":
            assert plan.order is not None
            return set([j for j in plan.order if j not in exact_experts][: plan.budget])
        if plan.ranking == "router":
            return set(self.best(self.utility(rows), without=exact_experts)[: plan.budget])
        votes = self.count_votes(rows)
        utility = self.utility(rows, "full")
        ranked = [j for j in range(self.num_experts) if (votes[j] or utility[j]) and j not in exact_experts]
        ranked.sort(key=lambda j: (-votes[j], -utility[j], j))
        retain = plan.budget if plan.drop is None else sum(votes[j] > 0 for j in ranked) - plan.drop
        assert retain is not None
        return set(ranked[: max(retain, self.router.top_k)])

    def count_votes(self, rows: list[int]) -> list[int]:
        """Return the number of votes for each expert. A row votes for its own top-k; exact rows do not vote."""
        return [sum(j in self.top_k[i] for i in rows if i not in self.exact) for j in range(self.num_experts)]

    def follow_voters(self, confidence: float, selected: set[int]) -> set[int]:
        def share(i: int) -> float:
            return max(self.fixed[i]) / sum(self.fixed[i]) if sum(self.fixed[i]) else 0.0

        by_confidence = sorted((i for i in self.rows if i not in self.exact), key=lambda i: (-share(i), i))
        reach = {i: math.ceil(confidence * sum(self.fixed[i])) for i in self.rows}
        sure = [i for i in by_confidence if share(i) > 0 and max(self.fixed[i]) >= reach[i]]
        voters = sure[: self.plan.max_voters] or by_confidence[:1]
        votes = self.count_votes(voters)
        selected = selected.union(j for j in range(self.num_experts) if votes[j] >= self.plan.min_votes)
        selected = selected.union(*(self.ranking[i][:1] for i in voters))
        rest = self.best(self.utility(self.rows, "full"), without=selected)
        return selected.union(rest[: max(self.router.top_k - len(selected), 0)])

    # Cover: the experts of every row.

    def cover_rows(self, selected: set[int]) -> tuple[dict[int, list[int]], int]:
        """Return the experts of every valid row, best first, and the number of rescued rows.

        A rescued row adds its first choice to `selected`.
        """
        if self.plan.coverage == "own":
            return self.kept, 0
        if self.plan.coverage == "substitute":
            return {i: self.substitute(i, selected) for i in self.rows}, 0
        lost = [i for i in self.rows if self.top_k[i] and not selected.intersection(self.top_k[i])]
        if self.plan.rescue:
            selected.update(self.ranking[i][0] for i in lost)
        truncated = {i: [j for j in self.top_k[i] if j in selected] for i in self.rows}
        return truncated, len(lost) if self.plan.rescue else 0

    def substitute(self, i: int, selected: set[int]) -> list[int]:
        if i in self.exact:
            return self.top_k[i]
        reach = self.ranking[i][: self.plan.max_rank]
        usable = [j for j in self.ranking[i] if j in self.kept[i] or (j in reach and j in selected)]
        return self.take(usable, self.plan.kmax)

    def weigh(self, i: int, experts: list[int]) -> torch.Tensor:
        """Return the weights of row `i`: the scores P of its experts, multiplied by the router's scaling.

        If the model renormalizes, P is also divided by a sum. By default this is the sum of P over the row's experts.
        With coverage `truncate` it is the sum over the row's whole top-k. With `own_share` the divisor is a geometric
        mean of both sums. If the divisor is 0, every P counts as 1.
        """
        weights = self.scores[i, experts]
        if not self.router.renormalize:
            return weights * self.router.scaling
        own = self.scores[i, self.top_k[i]]
        if self.divisor(weights, own) == 0:
            weights, own = torch.ones_like(weights), torch.ones_like(own)
        return weights / self.divisor(weights, own) * self.router.scaling

    def divisor(self, chosen: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        share = 1.0 if self.plan.coverage == "truncate" else self.plan.own_share
        return (chosen.sum().double() ** (1 - share) * own.sum().double() ** share).float()

    def mask(self, experts: set[int]) -> torch.Tensor:
        mask = torch.zeros(self.num_experts, dtype=torch.bool)
        mask[list(experts)] = True
        return mask.to(self.device)
