"""Ranks that each route rows of their own: a small model, and the loads they are asked to serve."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from stage.fake import forward_batch

LAYERS, EXPERTS, TOP_K, WIDTH = 3, 32, 4, 16


@dataclass(frozen=True)
class Load:
    """One step: requests of each attention-DP rank, and modes; with `longest` padded to it, else its own rows."""

    requests: tuple[int, ...]
    mode: str = "decode"
    draft_tokens: int = 1
    longest: bool = True
    prefills: tuple[int, ...] = ()
    """Ranks that prefill meanwhile."""

    def rows(self, share: int) -> list[int]:
        """Router rows of each rank of data-parallel attention, a multiple of the `share` ranks that divide them."""
        own = [-(-count * self.draft_tokens // share) * share for count in self.requests]
        return [max(own)] * len(own) if self.longest else own

    def valid(self, share: int) -> torch.Tensor:
        """[rows of all] bool."""
        counts = zip(self.rows(share), self.requests, strict=True)
        return torch.cat([torch.arange(rows) < count * self.draft_tokens for rows, count in counts])

    def hidden(self, share: int) -> torch.Tensor:
        """[rows of all, width]: what the layers are given, padding included, which holds what was there before."""
        rows = sum(self.rows(share))
        return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows + len(self.requests)))

    def batches(self, share: int) -> list[SimpleNamespace]:
        """The forward batch of each rank of data-parallel attention."""
        verify = SimpleNamespace(draft_token_num=self.draft_tokens, is_verify_input=lambda: True)
        batches = []
        for rank, (rows, count) in enumerate(zip(self.rows(share), self.requests, strict=True)):
            mode = "prefill" if rank in self.prefills else self.mode if count else "idle"
            batch = forward_batch(mode, rows, padding=rows - count * self.draft_tokens)
            batch.global_num_tokens_cpu = self.rows(share)
            batch.is_extend_in_batch = bool(self.prefills)
            batch.spec_info = verify if self.mode == "verify" else None
            batches.append(batch)
        return batches


@dataclass(frozen=True)
class Case:
    """Loads that `size` ranks serve one after another, each `share` of them with the same requests."""

    name: str
    size: int
    share: int
    policy: str
    keys: dict[str, Any]
    loads: tuple[Load, ...]


XSHARE = {"k0": 1, "add": 3}
PER_REQUEST = {"k0": 1, "add": 0, "add_per_request": 2}
DECODE = (
    Load((3, 3)),
    Load((5, 2)),  # padded
    Load((4, 0)),  # idle, padded to the longest
    Load((0, 6), longest=False),  # idle without a row
    Load((7, 1), longest=False),  # uneven
    Load((4, 3), prefills=(1,)),
    Load((4, 0), prefills=(0,)),  # an idle rank while the other prefills
    Load((1, 0), longest=False),  # no rank but one has a row
    Load((2, 8)),
)
FOUR = (
    Load((3, 1, 0, 2)),
    Load((0, 0, 9, 0), longest=False),
    Load((5, 0, 1, 7), longest=False),
    Load((2, 2, 2, 2), prefills=(0, 3)),
    Load((0, 4, 4, 0)),
)
VERIFY = (Load((2, 3), "verify", 4), Load((3, 0), "verify", 4, longest=False), Load((1, 2), "verify", 4, longest=False))
CASES = (
    Case("two", 2, 1, "xshare", XSHARE, DECODE),
    Case("two alone", 2, 1, "xshare", XSHARE | {"rows": "rank"}, DECODE),
    Case("two verify", 2, 1, "xshare", PER_REQUEST, VERIFY),
    Case("two observe", 2, 1, "observe", {"plans": ["xshare:k0=1,add=3", "oea:k0=2"]}, DECODE),
    Case("four", 4, 1, "xshare", XSHARE, FOUR),
    Case("four alone", 4, 1, "xshare", XSHARE | {"rows": "rank"}, FOUR),
    Case("four, two share", 4, 2, "xshare", XSHARE, DECODE),
    Case("four, two share alone", 4, 2, "xshare", XSHARE | {"rows": "rank"}, DECODE),
    Case("four, two share verify", 4, 2, "xshare", PER_REQUEST, VERIFY),
)


class Model:
    """Layers that route, (weights, ids) [rows, k], and add what `run` makes of a layer's rows [rows, width]."""

    def __init__(self, route: Callable[..., Any], run: Callable[..., torch.Tensor]) -> None:
        self.gates = torch.randn(LAYERS, WIDTH, EXPERTS, generator=torch.Generator().manual_seed(1))
        self.route, self.run = route, run

    def forward(self, hidden: torch.Tensor, positions: Any, forward_batch: Any) -> list[dict[str, torch.Tensor]]:
        """What every layer routed and gave. Upstream's signature."""
        calls = []
        for number in range(LAYERS):
            weights, ids = self.route(number, hidden, hidden @ self.gates[number])
            hidden = hidden + self.run(number, hidden, weights, ids)
            calls.append({"weights": weights, "ids": ids, "hidden": hidden})
        return calls


def run_experts(
    number: int, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, held: Sequence[int] = range(EXPERTS)
) -> torch.Tensor:
    """[rows, width]: the sum of the `held` experts of a layer, by loops; an id of -1 goes nowhere."""
    kernels = torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(100 + number)) / WIDTH
    out = torch.zeros_like(hidden)
    for expert in held:
        share = weights.where(ids == expert, 0).sum(1, keepdim=True)
        out += share * torch.tanh(hidden @ kernels[expert])
    return out
