"""The sizes of a model's experts, KV cache and other weights. They follow from the names and shapes of its tensors."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..policies.keys import as_json
from .tensors import Tensor

LAYER = re.compile(r"^(?:(.*?)\.)?(\d+)\.(.*)$")
"""A pattern for the name of a tensor in a layer.

Its groups are the name of the list of layers, the number of the layer, and the tensor's name within the layer.
"""
EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
DRAFT = re.compile(r"(^|\.)(mtp|nextn|eh_proj|enorm|hnorm)")
"""Names of draft heads. A server loads a draft head only with --speculative-algorithm, as a separate model."""
EMBEDDING, HEAD = re.compile(r"embed|(^|\.)wte\."), re.compile(r"(^|\.)(lm_head|output|head)\.")
CACHED = re.compile(r"(^|\.)(\w*(?:attn|attention|mixer))\.(\w+)\.(weight|weight_packed|scales)$")
KEYS = ("k_proj", "v_proj", "kv_proj", "wkv", "kv_a_proj_with_mqa", "wkv_a")
"""Projections whose outputs are cached. The projections from `kv_proj` on compute keys and values as one head."""
FUSED = ("qkv_proj", "query_key_value", "Wqkv", "c_attn")
STATE = ("A_log", "dt_bias", "conv1d.weight", "k_conv1d.weight")
"""Names of parameters of linear attention, which has a state of fixed size instead of cached tokens."""
KV_HEADS = ("num_key_value_heads", "num_attention_groups")


@dataclass(frozen=True)
class Parts:
    """The sizes of a model's parts. `experts`, `read` and `held` are in bytes.

    - `experts` is the size of all experts in `moe_layers` layers.
    - `read` is the size of all other weights that a decode step reads. It includes the embedding only if the embedding
      is also the LM head.
    - `held` is the size of all other weights that a GPU holds.
    - `cached` is the number of values in the KV cache for one token. At most `cache_heads` ranks divide these values.
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
    """Return the sizes of a model's parts. `text` is the configuration of its language model.

    `count` returns the bytes of a tensor. Its second argument is True if the tensor belongs to an expert. Raises
    ValueError if no tensor belongs to an expert, if no tensor projects to keys and values, or if a number of heads is
    wrong.
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
    """Split the name of a tensor into the list of layers, the number of the layer, and the name within the layer.

    The list of layers is None if the tensor is outside the layers.
    """
    found = LAYER.match(name)
    return (found[1] or "", int(found[2]), found[3]) if found else (None, 0, name)


def _is_expert(tensor: Tensor, name: str, num_experts: int) -> bool:
    """Return whether a tensor belongs to routed experts. Its module's name or its first dimension shows this."""
    stacked = len(tensor.shape) == 3 and tensor.shape[0] == num_experts and tensor.shape[1] > 1
    return stacked or EXPERTS.search(name) is not None


def _count_cached(attention: list[tuple[int, str, Tensor]], text: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of cached values for one token in all layers, and the number of heads that ranks can divide."""
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
            cached += width * (1 + alone)  # Gemma 4 caches keys twice if they are also the values
            heads = 1 if found[3] in KEYS[2:] else heads
        elif found[3] in FUSED:
            cached += width * 2 * heads // (queries + 2 * heads)
    if not cached:
        raise ValueError("none of the model's tensors projects to keys and values")
    return cached, heads


def _read_heads(text: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """Return the number of heads. If each layer has its own number, return the first layer's number.

    Raises ValueError if the number is not a positive integer.
    """
    name, value = next(((name, text[name]) for name in names if text.get(name)), ("", None))
    value = value[0] if isinstance(value, list) else value
    if value is not None and (type(value) is not int or value < 0):
        raise ValueError(f"config.json: {name} must be a positive integer (got {as_json(value)})")
    return value
