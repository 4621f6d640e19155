"""A Mixture-of-Experts model, as far as a schedule must fit it: read from its configuration, without torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..refusal import ExpertPolicyError, refusal
from ..upstream.configuration import NUM_EXPERTS, TOP_K, find_name, find_value
from ..upstream.server import attention_dp_size
from .architectures import GATHERED, UNSERVED

TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config.text_config")
"""Where the configuration of a model of several modes has its language model's; ModelConfig finds it itself."""


class WrongNumber(ExpertPolicyError):
    """A number of a configuration that no model can have."""


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
    for names, count in ((NUM_EXPERTS, num_experts), (TOP_K, top_k)):
        if isinstance(count, list):
            reason = f"{architecture}: {count} experts by layer; allowed is the same number in each"
            raise refusal(flag, path, reason)
        _check_count(flag, path, find_name(text_config, names), count, low=0)
    _check_count(flag, path, "num_hidden_layers", model.num_hidden_layers)
    if num_experts < 2 or not top_k:
        raise refusal(flag, path, f"{architecture} is a dense model; allowed are Mixture-of-Experts models")
    if top_k > num_experts:
        name = find_name(text_config, TOP_K)
        raise WrongNumber(flag, path, f"config.json: {name} {top_k}: allowed is at most the {num_experts} experts")
    return MoeModel(
        path=path,
        architecture=architecture,
        num_layers=model.num_hidden_layers,
        num_experts=num_experts,
        top_k=top_k,
        scoring=getattr(text_config, "scoring_func", None) or "softmax",
        renormalize=getattr(text_config, "norm_topk_prob", True),
    )


def _check_count(flag: str, path: str, name: str, count: Any, low: int = 1) -> None:
    """Raise `WrongNumber` for what is no integer of a configuration."""
    if type(count) is not int or count < low:
        value = json.dumps(count, default=str)
        raise WrongNumber(flag, path, f"config.json: {name} {value}: allowed is an integer of at least 1")


def check_attention(model: MoeModel, config: Any) -> None:
    """Raise `ExpertPolicyError` where upstream does not serve the model with the data-parallel attention asked for."""
    if attention_dp_size(config) > 1 and model.architecture not in GATHERED:
        allowed = ", ".join(sorted(GATHERED))
        reason = f"{model.architecture} is not known to have data-parallel attention; allowed are {allowed}"
        raise refusal("--model-path", model.path, reason)


def read_folder(folder: str) -> MoeModel:
    """Read a model's config.json. Raises `ExpertPolicyError` as `read_model` does, and where there is none."""
    config = _read_json(folder, object_hook=lambda keys: SimpleNamespace(**keys))
    text = _find_text(config)
    for part, name in ((text, "num_hidden_layers"), (config, "architectures")):
        if not getattr(part, name, None) and getattr(part, name, None) != 0:
            raise ExpertPolicyError("--model", folder, f"config.json: no {name}; allowed is a model's folder")
    loaded = SimpleNamespace(hf_config=config, hf_text_config=text, num_hidden_layers=text.num_hidden_layers)
    return read_model(loaded, folder, "--model")


def read_configs(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(a model's whole configuration, that of its language model). Raises `ExpertPolicyError` where there is none."""
    config = _read_json(folder)
    if not isinstance(config, dict):
        raise ExpertPolicyError("--model", folder, "config.json: no object; allowed is a model's folder")
    return config, _find_text(config)


def _read_json(folder: str, **options: Any) -> Any:
    try:
        return json.loads((Path(folder) / "config.json").read_bytes(), **options)
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ExpertPolicyError("--model", folder, f"config.json: {reason}; allowed is a model's folder") from None


def _find_text(config: Any) -> Any:
    """The language model's part of a configuration, which is all of most."""
    for name in TEXT_CONFIGS:
        part = config
        for key in name.split("."):
            part = part.get(key) if isinstance(part, dict) else getattr(part, key, None)
        if part:
            return part
    return config
