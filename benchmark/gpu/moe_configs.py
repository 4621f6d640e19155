"""Launch configurations in upstream's own files: upstream's choice for a shape, and tuned ones over it.

Upstream looks a shape up by the nearest number of tokens in `configs/triton_X_Y_Z/E=...,N=...,device_name=....json`
below $SGLANG_MOE_CONFIG_DIR, so tuned files need no patch. `..._down.json` beside it is for the down projection, which
reads the other file only if upstream has none of its own: both are written.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Configs = dict[str, dict[str, Any]]
"""Number of tokens, as text -> configuration: the content of one file."""
FOLDER = "moe-configs"


def read_upstream(experts: int, hidden: int, width: int, top_k: int, tokens: Sequence[int]) -> dict[str, Configs]:
    """Return the files of a bfloat16 shape, by path below `configs/`, that leave upstream's choices unchanged.

    The files list `tokens`, and every larger number at which upstream's heuristic, which applies without a file,
    changes. The first file is for the up projection, the second for the down projection.
    """
    import triton
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config as upstream

    def choose(rows: int) -> tuple[dict[str, Any], dict[str, Any]]:
        shapes = (experts, 2 * width, hidden), (experts, hidden, width)
        up, (down, _) = upstream.try_get_optimal_moe_config(*shapes, top_k, None, rows, return_down_config=True)
        return dict(up), dict(down or up)

    keys = [upstream.get_moe_configs(experts, width, None, 0, 0, down_moe=down) or () for down in (False, True)]
    first = max(tokens) + 1
    last = max([*tokens, experts, *keys[0], *keys[1]]) + 1  # the heuristic changes at the number of experts
    chosen = {rows: choose(rows) for rows in [*tokens, *range(first, last + 1)]}
    # Beyond the tokens, both sides of each change choose the same.
    changes = [rows for rows in range(first + 1, last + 1) if chosen[rows] != chosen[rows - 1]]
    kept = sorted({*tokens, first, *changes, *(rows - 1 for rows in changes)})
    folder = f"triton_{triton.__version__.replace('.', '_')}"
    names = [upstream.get_config_file_name(experts, width, None, down_moe=down) for down in (False, True)]
    return {f"{folder}/{name}": {str(rows): chosen[rows][i] for rows in kept} for i, name in enumerate(names)}


def merge(files: Mapping[str, Configs], tuned: Mapping[int, dict[str, Any] | None]) -> dict[str, Configs]:
    """Return the files with the tuned configurations for both projections; at None they stay unchanged."""
    new = {str(rows): config for rows, config in tuned.items() if config is not None}
    merged = {path: {**configs, **new} for path, configs in files.items()}
    return {path: dict(sorted(configs.items(), key=lambda one: int(one[0]))) for path, configs in merged.items()}


def write_files(folder: Path, files: Mapping[str, Configs]) -> None:
    """Write files of `read_upstream` or `merge` into a folder for $SGLANG_MOE_CONFIG_DIR."""
    for name, configs in files.items():
        path = folder / "configs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(configs, indent=4) + "\n")
