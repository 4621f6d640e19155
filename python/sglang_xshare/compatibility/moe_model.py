"""A Mixture-of-Experts model, as far as a schedule must fit it: read from its configuration, without torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from ..policies.keys import as_json
from ..refusal import ExpertPolicyError, refusal
from ..upstream.configuration import NUM_EXPERTS, TOP_K, find_name, find_value
from ..upstream.server import attention_dp_size
from .architectures import GATHERED, UNSERVED

TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where the configuration of a model of several modes has its language model's; ModelConfig finds it itself."""
MOST = 10_000
"""Of layers and of experts: a config.json with a slip of the key would be planned for hours."""


@dataclass(frozen=True)
class MoeModel:
    """What a model's configuration says of it; names as in `Router`. `path` is the server's --model-path."""

    path: str
    architecture: str
    num_layers: int
    num_experts: int
    top_k: int
    scoring: str
    renormalize: bool


def read_model(model: Any, path: str, flag: str = "--model-path") -> MoeModel:
    """Read upstream's `ModelConfig`; `flag` has named it. Raises `ExpertPolicyError` for a dense model, one that is
    known not to be served, and one whose layers differ in experts or top-k.
    """
    text_config = model.hf_text_config
    num_experts, top_k = (find_value(text_config, names) for names in (NUM_EXPERTS, TOP_K))
    architecture = model.hf_config.architectures[0]
    if architecture in UNSERVED:
        reason = f"{architecture}: {UNSERVED[architecture]}; allowed is a model whose layers each have one TopK"
        raise refusal(flag, path, reason)
    for name, count in (
        (find_name(text_config, NUM_EXPERTS), num_experts),
        (find_name(text_config, TOP_K), top_k),
        ("num_hidden_layers", model.num_hidden_layers),
    ):
        if type(count) is not int:
            reason = f"{architecture}: {name} {count!r}: allowed is the same integer in each layer"
            raise refusal(flag, path, reason)
    if num_experts < 2 or top_k < 1:
        raise refusal(flag, path, f"{architecture} is a dense model; allowed are Mixture-of-Experts models")
    for what, count, least in (("layers", model.num_hidden_layers, 1), ("experts", num_experts, 2)):
        if not least <= count <= MOST:
            reason = f"{architecture}: {count:,} {what}: allowed are {least} to {MOST:,}"
            raise refusal(flag, path, reason)
    if top_k > num_experts:
        raise refusal(flag, path, f"{architecture}: {top_k} of {num_experts} experts: allowed are as many at most")
    return MoeModel(
        path=path,
        architecture=architecture,
        num_layers=model.num_hidden_layers,
        num_experts=num_experts,
        top_k=top_k,
        scoring=getattr(text_config, "scoring_func", None) or "softmax",
        renormalize=getattr(text_config, "norm_topk_prob", True),
    )


def check_attention(model: MoeModel, config: Any) -> None:
    """Raise `ExpertPolicyError` where upstream does not serve the model with the data-parallel attention asked for."""
    if attention_dp_size(config) > 1 and model.architecture not in GATHERED:
        allowed = ", ".join(sorted(GATHERED))
        reason = f"{model.architecture} is not known to have data-parallel attention; allowed are {allowed}"
        raise refusal("--model-path", model.path, reason)


def read_written(folder: str) -> dict[str, Any]:
    """Return the content of a folder's config.json. Raises `ExpertPolicyError` if it is not a JSON object."""
    try:
        found = json.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ExpertPolicyError("--model", folder, f"config.json: {reason}; allowed is a model's folder") from None
    if not isinstance(found, dict):
        raise ExpertPolicyError("--model", folder, f"config.json must be a JSON object (got {as_json(found)})")
    return found


def read_folder(
    folder: str, changes: Mapping[str, Any] = MappingProxyType({})
) -> tuple[MoeModel, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return (the model, its config.json, its config.json with the `changes` that --json-model-override-args makes, the
    changed part of its language model). The model is read from the changed part. Raises `ExpertPolicyError` as
    `read_model` and `read_written` do.
    """
    original = read_written(folder)
    config = dict(original)
    for name, value in changes.items():
        merges = isinstance(value, dict) and isinstance(config.get(name), dict)
        config[name] = {**config[name], **value} if merges else value
    # Without one of these it is the language model's as a whole, as most are.
    text = next((part for name in TEXT_CONFIGS if isinstance(part := config.get(name), dict) and part), config)
    nested = text.get("text_config")  # of a thinker
    text = nested if isinstance(nested, dict) and nested else text
    for part, name in ((text, "num_hidden_layers"), (config, "architectures")):
        if not part.get(name):
            raise ExpertPolicyError("--model", folder, f"config.json: no {name}; allowed is a model's folder")
    whole, language = _name(config), _name(text)
    loaded = SimpleNamespace(hf_config=whole, hf_text_config=language, num_hidden_layers=text["num_hidden_layers"])
    return read_model(loaded, folder, "--model"), original, config, text


def _name(config: Any) -> Any:
    """Return a configuration with its keys as attributes, at every depth."""
    return json.loads(json.dumps(config), object_hook=lambda keys: SimpleNamespace(**keys))
