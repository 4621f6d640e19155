"""A batch and a router in plain numbers, as the papers' algorithms take them."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from sglang_xshare import Batch, Router

MINUS_INF = -math.inf


@dataclass
class Case:
    """A batch and a model's router, in plain numbers. A case has the attributes of both."""

    logits: torch.Tensor
    router: Router
    batch: Batch
    rank_of_expert: list[int]

    def __post_init__(self):
        vars(self).update(vars(self.router) | vars(self.batch))
        n, self.num_experts = self.logits.shape
        table = torch.where(self.logits.isfinite(), self.logits.float(), MINUS_INF)
        rows = table.tolist()
        self.P = [[0.0 if math.isnan(x) else x for x in row] for row in self.score(table).tolist()]
        # What is added up: of scores without an upper bound, their shares of the row.
        self.M = self.P
        if self.scoring == "sqrtsoftplus":
            self.M = [[x / sum(row) if sum(row) > 0 else 0.0 for x in row] for row in self.P]
        bias = self.correction_bias
        biased = rows if bias is None else (torch.tensor(self.P).view_as(table) + bias.float()).tolist()
        self.C = [
            self.limit_groups([MINUS_INF if x == MINUS_INF else c for x, c in zip(row, biased[i], strict=True)])
            for i, row in enumerate(rows)
        ]
        self.rows = [i for i in range(n) if self.valid is None or bool(self.valid[i])]
        self.exact_rows = [i for i in self.rows if self.exact is not None and bool(self.exact[i])]
        self.others = [i for i in self.rows if i not in self.exact_rows]
        self.ranking = [rank(range(self.num_experts), choice) for choice in self.C]
        self.top = [self.take(ranked) for ranked in self.ranking]

    def but(self, **batch):
        """The case with another batch."""
        return replace(self, batch=replace(self.batch, **batch))

    def score(self, table):
        if self.scoring == "sqrtsoftplus":
            return torch.nn.functional.softplus(table.double()).sqrt().float()
        return table.softmax(1) if self.scoring == "softmax" else table.sigmoid()

    def take(self, ranked, count=None):
        """The first `count` experts; of a router that takes as many of each group, while it has not had its share."""
        taken = []
        for j in ranked:
            size = self.num_experts // (self.quota_groups or 1)
            mates = [other for other in taken if other // size == j // size]
            if self.quota_groups is None or len(mates) < self.top_k // self.quota_groups:
                taken.append(j)
        return taken[: count or self.top_k]

    def limit_groups(self, choice):
        """DeepSeek's router: only the experts of a row's best groups remain."""
        if self.num_expert_group is None:
            return choice
        size = self.num_experts // self.num_expert_group
        groups = [list(range(g * size, (g + 1) * size)) for g in range(self.num_expert_group)]
        group_scores = []
        for group in groups:
            best = sorted((choice[j] for j in group), reverse=True)
            score = np.float32(best[0])
            if self.correction_bias is not None and size > 1:
                score = score + np.float32(best[1])
            group_scores.append(float(score))
        ranked = sorted(range(len(groups)), key=lambda g: (-group_scores[g], g))
        allowed = {j for g in ranked[: self.topk_group] for j in groups[g]}
        return [c if j in allowed else MINUS_INF for j, c in enumerate(choice)]

    def held(self, rows=None):
        """The experts that exact rows bring, all of them or those of some rows: no budget counts them."""
        return {j for i in self.exact_rows if rows is None or i in rows for j in self.top[i]}

    def free(self, free_residents=None):
        """The experts that cost nothing, since they are loaded; None where no expert does."""
        if self.resident is None or free_residents is False:
            return None
        return {j for j in range(self.num_experts) if bool(self.resident[j])}

    def requests(self):
        """The valid rows of every request."""
        starts = range(0, len(self.P), self.tokens_per_request)
        return [[i for i in range(r, r + self.tokens_per_request) if i in self.rows] for r in starts]


@dataclass
class Answer:
    """S, the experts of every row (none for padding), rescued rows, and what each row's weights are divided by."""

    selected: set[int]
    experts: list[list[int]]
    rescued: int = 0
    whole: list[list[int]] | None = None


def rank(experts, choice):
    """Experts that can be chosen at all, best first; the lower index first in a tie."""
    alive = [j for j in experts if choice[j] > MINUS_INF]
    return sorted(alive, key=lambda j: (-choice[j], j))
