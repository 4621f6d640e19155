"""The parts of a model by the names and shapes of its tensors: experts, KV cache, and all else that a step reads."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .tensors import Tensor

LAYER = re.compile(r"^(?:(.*?)\.)?(\d+)\.(.*)$")
"""Groups: the root of a layer's list, the layer's number, a name within the layer."""
EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
DRAFT = re.compile(r"(^|\.)(mtp|nextn|eh_proj|enorm|hnorm)")
"""Names of heads that draft tokens, which a server loads only with --speculative-algorithm, as a separate model."""
EMBEDDING, HEAD = re.compile(r"embed|(^|\.)wte\."), re.compile(r"(^|\.)(lm_head|output|head)\.")
CACHED = re.compile(r"(^|\.)(\w*(?:attn|attention|mixer))\.(\w+)\.(weight|weight_packed|scales)$")
KEYS = ("k_proj", "v_proj", "kv_proj", "wkv", "kv_a_proj_with_mqa", "wkv_a")
"""Projections whose outputs attention caches. From `kv_proj` on, the output is one head: keys and values together."""
FUSED = ("qkv_proj", "query_key_value", "Wqkv", "c_attn")
STATE = ("A_log", "dt_bias", "conv1d.weight", "k_conv1d.weight")
"""Parameters of linear attention, which has a state of fixed size and caches no token."""
KV_HEADS = ("num_key_value_heads", "num_attention_groups")


@dataclass(frozen=True)
class Parts:
    """Bytes of a model: the `experts` of all `moe_layers`, and all else.

    `read` is all else that a decode step reads; the embedding counts only if it is also the head. `held` is all that a
    GPU holds beside experts. `cached` is the numbers that the KV cache has for a token; up to `cache_heads` ranks
    divide these numbers.
    """

    experts: float
    moe_layers: int
    read: float
    held: float
    cached: float
    cache_heads: int


def sort_tensors(
    tensors: Iterable[Tensor],
    num_experts: int,
    num_layers: int,
    text: Mapping[str, Any],
    count: Callable[[Tensor, bool], float],
) -> Parts:
    """Sort a model's tensors into its parts, by the configuration `text` of its language model.

    `count` returns the bytes of (a tensor, whether the tensor is an expert's). Raises ValueError if no name is an
    expert's or a projection to keys and values.
    """
    placed = [(tensor, *_place(tensor.name)) for tensor in tensors if not DRAFT.search(tensor.name)]
    roots = Counter(root or "" for tensor, root, _, name in placed if _is_expert(tensor, name, num_experts))
    if not roots:
        raise ValueError("none of the model's tensors is an expert's")
    language = max(roots, key=lambda root: roots[root])
    prefix = language.rpartition(".")[0]
    layers, attention = set(), []
    experts = read = held = head = 0.0
    embedding: float | None = None
    for tensor, root, number, name in placed:
        if root == language and number >= num_layers:  # a layer of a draft head
            continue
        if root == language and _is_expert(tensor, name, num_experts):
            layers.add(number)
            experts += count(tensor, True)
            continue
        size = count(tensor, False)
        held += size
        if root == language:
            attention.append((number, name, tensor))
        if root is None and HEAD.search(tensor.name):
            head += size
        elif tensor.name.startswith(prefix) and EMBEDDING.search(tensor.name):
            embedding = size if embedding is None else embedding
        elif tensor.name.startswith(prefix):
            read += size
    if not experts:
        raise ValueError("the model's experts have no weights")
    cached, heads = _count_cached(attention, text)
    return Parts(experts, len(layers), read + (head or embedding or 0.0), held, cached, heads)


def _place(name: str) -> tuple[str | None, int, str]:
    """Return (the root of a tensor's layer, the layer's number, the name within); None for the root outside layers."""
    found = LAYER.match(name)
    return (found[1] or "", int(found[2]), found[3]) if found else (None, 0, name)


def _is_expert(tensor: Tensor, name: str, num_experts: int) -> bool:
    """Return whether a tensor belongs to routed experts, by its module's name or its first dimension, all experts."""
    stacked = len(tensor.shape) == 3 and tensor.shape[0] == num_experts and tensor.shape[1] > 1
    return stacked or EXPERTS.search(name) is not None


def _count_cached(attention: list[tuple[int, str, Tensor]], text: Mapping[str, Any]) -> tuple[int, int]:
    """Return (the numbers that all layers cache for a token, the heads that ranks can divide)."""
    queries = _read_heads(text, ("num_attention_heads",)) or 1
    heads, cached = _read_heads(text, KV_HEADS) or queries, 0
    names = {(number, name) for number, name, _ in attention}
    for number, name, tensor in attention:
        found = CACHED.search(name)
        if found is None or any((number, f"{name[: found.start(3)]}{state}") in names for state in STATE):
            continue
        width = tensor.shape[-1 if found[4] == "scales" else 0]
        if found[3] in KEYS:
            alone = found[3] == "k_proj" and (number, name.replace("k_proj", "v_proj")) not in names
            cached += width * (1 + alone)  # keys that are values too are cached twice (Gemma 4)
            heads = 1 if found[3] in KEYS[2:] else heads
        elif found[3] in FUSED:
            cached += width * 2 * heads // (queries + 2 * heads)
    if not cached:
        raise ValueError("none of the model's tensors projects to keys and values")
    return cached, heads


def _read_heads(text: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """Return the number of heads; the first number of a list by layer."""
    value = next((text[name] for name in names if text.get(name)), None)
    return value[0] if isinstance(value, list) else value
