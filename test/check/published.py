"""Published shapes of the families in docs/limits.md, and the number of weights that each was published with."""

import json
from pathlib import Path
from typing import Any

import transformers

FAMILIES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""A class, its weights in billions with the digits that its model card or report has, and what its config.json has
beside what transformers' configuration class has by default.
"""
UNKNOWN = ("Granite-MoE shared", "Kimi K3", "Qwen3.8-Flash-Next", "Step-3.5")
"""Families without a row. transformers 5.12 has modules of the first alone, whose published shape was not at hand; the
weights of the others are counted from safetensors.
"""


def read_shape(name: str) -> dict[str, Any]:
    """Return the config.json of a family's published model."""
    architecture, changes = FAMILIES[name]["architecture"], FAMILIES[name].get("changes", {})
    known = getattr(transformers, architecture, None)  # not of every class
    whole = json.loads(json.dumps(known.config_class(**changes).to_dict(), default=str)) if known else {}
    return whole | {"architectures": [architecture]} | changes
