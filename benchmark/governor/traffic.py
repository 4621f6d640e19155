"""Traffic that changes, replayed token by token through the trained model: under one plan, or under a governor."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from benchmark.common.variant import parse_plan
from benchmark.quality.model import Layout, Prefilled, prefill
from benchmark.quality.text import Sequences
from sglang_xshare import SelectionPlan
from sglang_xshare.policies.governor import Governor, Search, begin, decide

MIXED = "mixed"
STRETCHES = (
    ("python", 2),
    (MIXED, 2),
    (MIXED, 1),
    ("english", 8),
    ("c", 1),
    ("arithmetic", 2),
    (MIXED, 8),
    ("english", 1),
    ("c", 8),
    ("python", 1),
)
"""What is decoded one after another: a domain or all in turns; the part of a domain's sequences that are a batch."""


@dataclass(frozen=True)
class Stretch:
    """One batch of sequences, decoded from the end of their prompts."""

    name: str
    prefilled: Prefilled
    tokens: torch.Tensor
    """[sequences, steps + 1] int64: what follows the prompts; the last one is only predicted."""

    @property
    def batch(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Replayed:
    """`nats` [sequences of all stretches, steps], `active` and `kept_mass` [stretches, steps] of a layer and row;
    `budgets` [stretches, steps] where a governor moved them.
    """

    nats: torch.Tensor
    active: torch.Tensor
    kept_mass: torch.Tensor
    budgets: torch.Tensor | None = None
    moves: int = 0


def make_traffic(model: PreTrainedModel, sequences: Sequences, prompt: int) -> list[Stretch]:
    """The stretches, each of sequences at other places in the text than the one before it. Raises ValueError for texts
    without one of their domains.
    """
    domains = sorted(set(sequences.domains))
    missing = {name for name, _ in STRETCHES} - {MIXED, *domains}
    if missing:
        raise ValueError(f"texts of {', '.join(domains)}: the traffic needs {', '.join(sorted(missing))}")
    rows = {name: sequences.of_domain(name).nonzero().flatten().tolist() for name in domains}
    rows[MIXED] = sequences.mixing()
    taken = dict.fromkeys(rows, 0)
    stretches = []
    for name, part in STRETCHES:
        size = max(len(rows[domains[0]]) // part, 2)
        start, taken[name] = taken[name], taken[name] + size
        own = [rows[name][(start + row) % len(rows[name])] for row in range(size)]
        tokens = sequences.take(own).tokens
        stretches.append(Stretch(f"{name} x {size}", prefill(model, tokens[:, :prompt]), tokens[:, prompt:]))
    return stretches


def replay(traffic: Sequence[Stretch], plan: SelectionPlan) -> Replayed:
    """All of it under one plan."""
    return _join([_run(one.prefilled.copy(), one, 0, one.tokens.shape[1] - 1, plan) for one in traffic])


def replay_governed(traffic: Sequence[Stretch], governor: Governor, family: str) -> Replayed:
    """All of it under a governor, which begins at its highest budget and decides when it does in a server: a step after
    those that it decides on. `family` is the policy as it is spelt up to the budget.
    """
    search = begin(governor, governor.high)
    found: list[Replayed] = []
    since: list[tuple[float, int]] = []
    """(kept mass, rows) of the steps since the last decision."""
    moves = 0
    for one in traffic:
        prefilled, steps, at = one.prefilled.copy(), one.tokens.shape[1] - 1, 0
        parts = []
        while at < steps:
            length = min(governor.every + 1 - len(since), steps - at)
            part = _run(prefilled, one, at, length, parse_plan(f"{family}{search.budget}"))
            parts.append(replace(part, budgets=torch.full((1, length), search.budget)))
            since += [(kept, one.batch) for kept in part.kept_mass[0].tolist()]
            at += length
            if len(since) > governor.every:
                former, search = search, _decide(governor, search, since[: governor.every])
                moves += search.budget != former.budget
                since = []
        found.append(_join(parts, dim=1))
    return replace(_join(found), moves=moves)


def _decide(governor: Governor, search: Search, steps: Sequence[tuple[float, int]]) -> Search:
    return decide(governor, search, sum(kept * rows for kept, rows in steps) / sum(rows for _, rows in steps))


@torch.inference_mode()
def _run(prefilled: Prefilled, one: Stretch, at: int, length: int, plan: SelectionPlan) -> Replayed:
    inputs, targets = one.tokens[:, at : at + length], one.tokens[:, at + 1 : at + length + 1]
    logits, routing = prefilled.go_on(inputs, plan, Layout(one.batch))
    nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    active = torch.stack(routing.active).mean(0)[None]
    kept_mass = torch.stack(routing.kept_mass).mean((0, 2))[None]
    return Replayed(nats, active, kept_mass)


def _join(parts: Sequence[Replayed], dim: int = 0) -> Replayed:
    budgets = [part.budgets for part in parts if part.budgets is not None]
    return Replayed(
        torch.cat([part.nats for part in parts], dim),
        torch.cat([part.active for part in parts], dim),
        torch.cat([part.kept_mass for part in parts], dim),
        torch.cat(budgets, dim) if budgets else None,
    )
