"""The number of experts that are active in one layer of one step, computed from random logits."""

from typing import Any

import torch

from ..compatibility.moe_model import MoeModel
from ..policies import VANILLA
from ..policies.schedule import Schedule
from ..selection import select
from ..types import Batch, Router

LAYERS = 48
"""The number of layers over which numbers are averaged. Each layer has random logits for one step."""
ONE_THREAD = 2**20
"""The largest number of logits for which torch uses one thread.

With 16 rows on 2 cores, all operations take 0.1 s. Several threads would also wait for 1.3 s in busy loops.
"""


def draw_loads(
    schedule: Schedule | None, model: MoeModel, rows: int, tokens_per_request: int, common: float, ranks: int = 1
) -> dict[str, Any]:
    """Return how many experts are active in a layer, as means over layers with random logits.

    - `active_experts` contains the number of active experts without and with the policy.
    - `fullest_rank_experts` contains the same numbers for the rank with the most active experts.
    - `kept_mass` is the kept mass with the policy.

    If `schedule` is None, or does not act in this step, the policy is the model's own routing. A step with several
    tokens per request is a verify step. Each rank holds the same number of consecutive experts.

    The logits of a layer are normally distributed. All rows have a part of their logits in common. `common` is the
    share of the variance that comes from this part. The router renormalizes the weights. Raises ValueError if a plan
    does not fit the model.
    """
    threads = torch.get_num_threads()
    if rows * model.num_experts <= ONE_THREAD:
        torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    router, batch = Router(top_k=model.top_k, scoring=model.scoring), Batch(tokens_per_request=tokens_per_request)
    phase = "verify" if tokens_per_request > 1 else "decode"
    rank_of_expert = torch.arange(model.num_experts) * ranks // model.num_experts
    counts = []
    try:
        for layer in range(LAYERS):
            of_model = layer * model.num_layers // LAYERS
            plan = schedule.plans_for(of_model, phase, rows)[0] if schedule else VANILLA
            shared = torch.randn(1, model.num_experts, generator=generator)
            own = torch.randn(rows, model.num_experts, generator=generator)
            logits = common**0.5 * shared + (1 - common) ** 0.5 * own
            for one in (VANILLA, plan):
                out = select(logits, one, router, batch, rank_of_expert, backend="torch")
                by_rank = torch.bincount(rank_of_expert[out.active], minlength=ranks)
                counts.append([float(by_rank.sum()), float(by_rank.max()), float(out.kept_mass.mean())])
    finally:
        torch.set_num_threads(threads)
    active, fullest, kept_mass = torch.tensor(counts, dtype=torch.float64).view(LAYERS, 2, 3).mean(0).T.tolist()
    return {"active_experts": active, "fullest_rank_experts": fullest, "kept_mass": kept_mass[1]}
