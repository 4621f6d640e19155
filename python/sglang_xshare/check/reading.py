"""The description of a model, read from the arguments that SGLang has resolved, or from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..compatibility.formats import MXFP4, find_quantization
from ..compatibility.moe_model import MoeModel, read_folder, read_written
from ..upstream.server import model_config, spell

if TYPE_CHECKING:
    from ..compatibility.checks import Start
    from ..compatibility.experts import Experts
    from .server import ServerFlags

WIDE = ("float", "float32")
"""Values of --dtype with 32 bits.

`auto` is not included, because SGLang then serves float32 weights in float16 (configs/model_config.py).
"""

UNQUANTIZED = "unquant"
"""The value of --quantization for weights in the model's dtype."""


@dataclass(frozen=True)
class Reading:
    """The description of a model as the server reads it.

    - `config` is the content of config.json.
    - `changes` come from --json-model-override-args.
    - `text` is the language model's part of config.json after these changes.
    - `plain` is the number of bits of a weight without quantization.
    - `quantization` is the name of the quantization, or "none".
    - `declared` is the quantization's configuration in the checkpoint.
    - `cache_bits` is the bits of a value in the KV cache.
    - `converts` is True if the server converts MXFP4 experts to bf16.
    """

    folder: Path
    model: MoeModel
    config: Mapping[str, Any]
    text: Mapping[str, Any]
    changes: Mapping[str, Any]
    plain: float
    quantization: str
    declared: Mapping[str, Any]
    load_format: str
    cache_bits: float
    converts: bool = False


def find_folder(model: str, revision: str | None) -> Path:
    """Return the folder of a model. Raises ValueError if the folder has no valid config.json.

    `model` is a folder, or the name of a model in Hugging Face's cache.
    """
    folder = Path(model)
    if not folder.exists():
        with suppress(ImportError, ValueError):  # ValueError if this is not a model's name
            from huggingface_hub import try_to_load_from_cache

            found = try_to_load_from_cache(model, "config.json", revision=revision)
            folder = Path(found).parent if isinstance(found, str) else folder
    if not (folder / "config.json").is_file():
        reason = "no config.json; the model must be a folder with one, or be cached"
        raise ValueError(f"--model {model}: {reason}")
    read_written(str(folder))
    return folder


def read_flagged(folder: Path, flags: ServerFlags) -> Reading:
    """Return the description of a model from config.json and the flags. Raises ValueError as `read_folder` does."""
    model, original, config, text = read_folder(str(folder), flags.changes)
    parts = SimpleNamespace(hf_config=SimpleNamespace(**config), hf_text_config=SimpleNamespace(**text))
    declared = find_quantization(parts)
    name = flags.quantization or (declared.get("quant_method") or "missing" if declared else "none")
    name = "none" if name == UNQUANTIZED else name
    plain = 32.0 if flags.dtype in WIDE else 16.0
    cache_bits = _count_cache_bits(flags.cache_dtype, plain)
    return Reading(folder, model, original, text, flags.changes, plain, name, declared, flags.load_format, cache_bits)


def read_resolved(folder: Path, flags: ServerFlags, start: Start, experts: Experts | None) -> Reading:
    """Return the description of a model from the resolved arguments. Raises ValueError as `read_flagged` does."""
    # triton runs MXFP4 experts in bf16, and layers without aiter turn auto into triton (create_moe_runner in mxfp4.py).
    converts = experts is not None and experts.format is MXFP4 and experts.runner in ("auto", "triton")
    config = model_config(start.server_args)
    plain = 32.0 if spell(config.dtype) == "torch.float32" else 16.0
    return replace(
        read_flagged(folder, flags),
        model=start.model,
        plain=plain,
        quantization=getattr(config, "quantization", None) or "none",
        declared=find_quantization(config),
        load_format=spell(start.config.load_format),
        cache_bits=_count_cache_bits(spell(start.config.kv_cache_dtype), plain),
        converts=converts,
    )


def _count_cache_bits(dtype: str, plain: float) -> float:
    """Return the bits of a value in the KV cache. `dtype` is --kv-cache-dtype. With fp4, 16 values share a scale."""
    if dtype.startswith(("fp8", "int8")):
        return 8.0
    if dtype.startswith("fp4"):
        return 4.5
    return plain if dtype == "auto" else 16.0
