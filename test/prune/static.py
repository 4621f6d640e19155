"""What a pruned checkpoint must answer: the whole model in transformers, routed by `moe-spec` with static orders."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from sglang_xshare import Router, build_plan, select

EXPERTS, LAYERS = 64, 4


def draw_orders(seed: int = 0) -> list[list[int]]:
    """One for each layer of the small checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(EXPERTS, generator=generator).tolist() for _ in range(LAYERS)]


def write_orders(file: Path, orders: Sequence[Sequence[int]], **keys: Any) -> Path:
    """As `moe-spec` takes them."""
    layers = {str(number): {"order": order} for number, order in enumerate(orders)}
    file.write_text(json.dumps({"order": orders[0], "layers": layers, **keys}))
    return file


@contextmanager
def static(model: Any, orders: Sequence[Sequence[int]], keep: int) -> Iterator[None]:
    """Within it a Qwen3-MoE routes every token, also of a prompt, among the `keep` best of each layer's order."""
    gates = [module for module in model.modules() if hasattr(module, "norm_topk_prob") and hasattr(module, "top_k")]
    with ExitStack() as stack:
        for gate, order in zip(gates, orders, strict=True):
            plan = build_plan("moe-spec", budget=keep, ranking="static", order=tuple(order))

            def route(gate: Any, args: Any, output: Any, plan: Any = plan) -> Any:
                out = select(output[0], plan, Router(gate.top_k, renormalize=gate.norm_topk_prob), backend="reference")
                return output[0], out.topk_weights.to(output[1].dtype), out.topk_ids.to(output[2].dtype)

            stack.callback(gate.register_forward_hook(route).remove)
        yield


def generate(model: Any, folder: Path, prompts: Sequence[str], tokens: int) -> tuple[list[list[int]], torch.Tensor]:
    """(so many greedy tokens after each prompt, their logits)."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers, logits = [], []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        out = model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)
        answers.append(out.sequences[0, ids.shape[1] :].tolist())
        logits.append(torch.cat(out.logits))
    return answers, torch.cat(logits)
