"""Files with launch configurations of the fused MoE, in SGLang's own format.

SGLang reads the file `configs/triton_X_Y_Z/E=...,N=...,device_name=....json` in $SGLANG_MOE_CONFIG_DIR, and uses the
configuration for the nearest number of tokens. So tuned files need no patch. A second file, `..._down.json`, is for the
down projection. Both files are written, because SGLang may contain a `_down` file of its own.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Configs = dict[str, dict[str, Any]]
"""The content of one file. It maps the number of tokens, as a string, to a configuration."""
FOLDER = "moe-configs"


def read_upstream(experts: int, hidden: int, width: int, top_k: int, tokens: Sequence[int]) -> dict[str, Configs]:
    """Return files that contain SGLang's own configurations for a bfloat16 shape.

    The keys are paths below `configs/`. The first file is for the up projection, and the second file is for the down
    projection. The files contain a configuration for every number in `tokens`. They also contain the larger numbers of
    tokens at which SGLang's configuration changes.
    """
    import triton
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config as upstream

    def choose(rows: int) -> tuple[dict[str, Any], dict[str, Any]]:
        shapes = (experts, 2 * width, hidden), (experts, hidden, width)
        up, (down, _) = upstream.try_get_optimal_moe_config(*shapes, top_k, None, rows, return_down_config=True)
        return dict(up), dict(down or up)

    keys = [upstream.get_moe_configs(experts, width, None, 0, 0, down_moe=down) or () for down in (False, True)]
    first = max(tokens) + 1
    last = max([*tokens, experts, *keys[0], *keys[1]]) + 1  # SGLang's heuristic changes at the number of experts
    chosen = {rows: choose(rows) for rows in [*tokens, *range(first, last + 1)]}
    # The numbers on both sides of each change are kept, so the nearest number always has the right configuration.
    changes = [rows for rows in range(first + 1, last + 1) if chosen[rows] != chosen[rows - 1]]
    kept = sorted({*tokens, first, *changes, *(rows - 1 for rows in changes)})
    folder = f"triton_{triton.__version__.replace('.', '_')}"
    names = [upstream.get_config_file_name(experts, width, None, down_moe=down) for down in (False, True)]
    return {f"{folder}/{name}": {str(rows): chosen[rows][i] for rows in kept} for i, name in enumerate(names)}


def merge(files: Mapping[str, Configs], tuned: Mapping[int, dict[str, Any] | None]) -> dict[str, Configs]:
    """Return the files with the tuned configurations for both projections.

    If the tuned configuration for a number of tokens is None, the original configuration stays.
    """
    new = {str(rows): config for rows, config in tuned.items() if config is not None}
    merged = {path: {**configs, **new} for path, configs in files.items()}
    return {path: dict(sorted(configs.items(), key=lambda one: int(one[0]))) for path, configs in merged.items()}


def write_files(folder: Path, files: Mapping[str, Configs]) -> None:
    """Write the files into a folder that $SGLANG_MOE_CONFIG_DIR can name."""
    for name, configs in files.items():
        path = folder / "configs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(configs, indent=4) + "\n")
