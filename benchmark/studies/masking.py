"""A model that is denied experts, row by row and layer by layer: what no policy does."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from benchmark.quality.model import prefill, router_of
from benchmark.quality.text import Sequences
from sglang_xshare import build_plan, select

Mask = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""(number of the MoE layer, hidden states [rows, hidden], router logits [rows, experts]) -> the logits, -inf where an
expert is denied. Rows are sequence by sequence, token by token; each then has its own top-k of what is left.
"""


@dataclass(frozen=True)
class Masked:
    """A model on some sequences, of which the first `prompt` tokens are prefilled and the last is only predicted.

    Its routers renormalize a softmax: elsewhere masked logits give other weights than the model's.
    """

    model: PreTrainedModel
    sequences: Sequences
    prompt: int

    @torch.inference_mode()
    def run(self, decode: Mask | None = None, prompt: Mask | None = None) -> torch.Tensor:
        """[sequences, tokens] float32: -log P of every token after the prompt but the first, under a mask in decoding,
        in prefill, in both or in neither.
        """
        tokens = self.sequences.tokens
        if prompt is None:
            cache = copy.deepcopy(self._prefilled)
        else:
            with ExitStack() as stack:
                self._hook(stack, prompt)
                cache = prefill(self.model, tokens[:, : self.prompt]).cache
        with ExitStack() as stack:
            if decode is not None:
                self._hook(stack, decode)
            logits = self.model(tokens[:, self.prompt : -1], past_key_values=cache).logits.float()
        targets = tokens[:, self.prompt + 1 :]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)

    @cached_property
    def _prefilled(self) -> Any:
        return prefill(self.model, self.sequences.tokens[:, : self.prompt]).cache

    def _hook(self, stack: ExitStack, mask: Mask) -> None:
        router, vanilla = router_of(self.model)[0], build_plan("vanilla")
        for number, block in enumerate(blocks(self.model)):

            def route(gate: Any, args: Any, output: Any, number: int = number) -> Any:
                logits, weights, ids = output
                chosen = select(mask(number, args[0].flatten(0, -2), logits), vanilla, router)
                return logits, chosen.topk_weights.to(weights.dtype), chosen.topk_ids.clamp(min=0).to(ids.dtype)

            stack.callback(block.gate.register_forward_hook(route).remove)


def blocks(model: PreTrainedModel) -> list[Any]:
    """The MoE blocks, layer by layer: a router `gate` beside `experts`."""
    return [module for module in model.modules() if hasattr(module, "gate") and hasattr(module, "experts")]


def deny_rank(rank: int, logits: torch.Tensor) -> torch.Tensor:
    """The logits without every row's own choice number `rank`, from 0."""
    return logits.scatter(-1, logits.topk(rank + 1).indices[..., rank:], -torch.inf)


def confidence(logits: torch.Tensor) -> torch.Tensor:
    """[rows]: the probability of every row's first choice."""
    return logits.softmax(-1).amax(-1)
