"""The properties of a Mixture-of-Experts model that a policy needs, read from its configuration without torch."""

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
"""Keys that contain the language model in a multimodal model's configuration. `ModelConfig` finds this part itself."""
MOST = 10_000
"""The largest number of layers or experts. With a much larger, mistyped number the server would compute for hours."""


@dataclass(frozen=True)
class MoeModel:
    """The properties of a model. `path` is the server's --model-path.

    `top_k`, `scoring` and `renormalize` have the same meaning as in `Router`.
    """

    path: str
    architecture: str
    num_layers: int
    num_experts: int
    top_k: int
    scoring: str
    renormalize: bool


def read_model(model: Any, path: str, flag: str = "--model-path") -> MoeModel:
    """Return the properties of a model. `model` is SGLang's `ModelConfig`.

    Raises `ExpertPolicyError` for a dense model, for a model class that is not supported, and for a model whose layers
    differ in their number of experts or top-k. The error names `flag`.
    """
    text_config = model.hf_text_config
    num_experts, top_k = (find_value(text_config, names) for names in (NUM_EXPERTS, TOP_K))
    architecture, layers = model.hf_config.architectures[0], model.num_hidden_layers
    names = find_name(text_config, NUM_EXPERTS), find_name(text_config, TOP_K), "num_hidden_layers"
    counts = dict(zip(names, (num_experts, top_k, layers), strict=True))
    wrong = next((f"{name} {count!r}" for name, count in counts.items() if type(count) is not int), None)
    reason = None
    if architecture in UNSERVED:
        reason = f": {UNSERVED[architecture]}; must be a model whose layers each have one TopK"
    elif wrong is not None:
        reason = f": {wrong}: must be the same integer in each layer"
    elif num_experts < 2 or top_k < 1:
        reason = " is a dense model; must be a Mixture-of-Experts model"
    elif not 1 <= layers <= MOST:
        reason = f": {layers:,} layers: must be 1 to {MOST:,}"
    elif num_experts > MOST:
        reason = f": {num_experts:,} experts: must be 2 to {MOST:,}"
    elif top_k > num_experts:
        reason = f": top-{top_k} of {num_experts} experts: must be at most {num_experts}"
    if reason is not None:
        raise refusal(flag, path, f"{architecture}{reason}")
    scoring, renormalize = getattr(text_config, "scoring_func", None), getattr(text_config, "norm_topk_prob", True)
    return MoeModel(path, architecture, layers, num_experts, top_k, scoring or "softmax", renormalize)


def check_attention(model: MoeModel, config: Any) -> None:
    """Raise `ExpertPolicyError` if data-parallel attention is on and the model is not known to support it."""
    if attention_dp_size(config) > 1 and model.architecture not in GATHERED:
        allowed = ", ".join(sorted(GATHERED))
        reason = f"{model.architecture} is not known to have data-parallel attention; must be one of {allowed}"
        raise refusal("--model-path", model.path, reason)


def read_written(folder: str) -> dict[str, Any]:
    """Return the content of a folder's config.json. Raises `ExpertPolicyError` if the file is not a JSON object."""
    try:
        found = json.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ExpertPolicyError("--model", folder, f"config.json: {reason}; must be a model's folder") from None
    if not isinstance(found, dict):
        raise ExpertPolicyError("--model", folder, f"config.json must be a JSON object (got {as_json(found)})")
    return found


def read_folder(
    folder: str, changes: Mapping[str, Any] = MappingProxyType({})
) -> tuple[MoeModel, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the properties of the model in a folder, and three parts of its configuration.

    The parts are:

    - the original config.json
    - config.json after the `changes` from --json-model-override-args
    - the language model in the changed config.json

    The properties are read from the changed config.json. Raises `ExpertPolicyError` as `read_model` and `read_written`
    do.
    """
    original = read_written(folder)
    config = dict(original)
    for name, value in changes.items():
        merges = isinstance(value, dict) and isinstance(config.get(name), dict)
        config[name] = {**config[name], **value} if merges else value
    # Most configurations have none of these keys, because they describe only a language model.
    text = next((part for name in TEXT_CONFIGS if isinstance(part := config.get(name), dict) and part), config)
    nested = text.get("text_config")  # only in a thinker_config
    text = nested if isinstance(nested, dict) and nested else text
    for part, name in ((text, "num_hidden_layers"), (config, "architectures")):
        if not part.get(name):
            raise ExpertPolicyError("--model", folder, f"config.json: no {name}; must be a model's folder")
    whole, language = _name(config), _name(text)
    loaded = SimpleNamespace(hf_config=whole, hf_text_config=language, num_hidden_layers=text["num_hidden_layers"])
    return read_model(loaded, folder, "--model"), original, config, text


def _name(config: Any) -> Any:
    """Return a configuration as an object whose attributes are the keys. Nested parts also become objects."""
    return json.loads(json.dumps(config), object_hook=lambda keys: SimpleNamespace(**keys))
