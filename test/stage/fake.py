"""A model as the stage sees one: `TopK` configs, a `forward`, a runner. What SGLang would do with them, and no more."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from sglang_xshare import stage

EXPERTS, TOP_K = 32, 4


@dataclass
class Config:
    """The fields of upstream's `TopKConfig` that the stage reads."""

    top_k: int = TOP_K
    scoring_func: str = "softmax"
    renormalize: bool = True
    correction_bias: torch.Tensor | None = None
    use_grouped_topk: bool = False
    num_expert_group: int | None = None
    topk_group: int | None = None
    custom_routing_function: Any = None
    routed_scaling_factor: float | None = None
    apply_routed_scaling_factor_on_output: bool = False
    num_fused_shared_experts: int = 0


class Model:
    """MoE layers only: each routes the same logits and keeps what it would hand to its runner, None for vanilla."""

    def __init__(self, num_layers: int = 3) -> None:
        self.configs = [Config() for _ in range(num_layers)]
        self.logits = torch.empty(0, EXPERTS)
        self.routed: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        self.skipped: set[int] = set()
        self.error: Exception | None = None

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any) -> str:
        """Upstream's signature."""
        self.routed = []
        for number, config in enumerate(self.configs):
            if number not in self.skipped:
                routed = stage.route(config)
                choose = routed.custom_routing_function
                self.routed.append(choose and choose(None, self.logits, routed.top_k, routed.renormalize))
        if self.error:
            raise self.error
        return "output"


def forward_batch(mode: str, rows: int, batch_size: int | None = None, padding: int = 0) -> SimpleNamespace:
    """A forward batch; the last `padding` rows are padding. Like upstream's, verify is a kind of extend."""
    slots = torch.arange(1, rows + 1)
    slots[rows - padding :] = 0
    return SimpleNamespace(
        forward_mode=SimpleNamespace(
            is_target_verify=lambda: mode == "verify",
            is_decode=lambda: mode == "decode",
            is_extend=lambda: mode in ("verify", "prefill"),
        ),
        input_ids=torch.zeros(rows, dtype=torch.int64),
        batch_size=batch_size or rows,
        out_cache_loc=slots,
    )


def runner(model: Model, device: str = "cpu", is_draft_worker: bool = False, **flags: Any) -> SimpleNamespace:
    """A model runner whose server was started with these flags."""
    return SimpleNamespace(
        model=model, device=device, is_draft_worker=is_draft_worker, server_args=SimpleNamespace(**flags)
    )
