"""Launch configurations in upstream's own files: what it uses for a shape, and tuned ones over them.

Upstream looks a shape up by the nearest number of tokens in `configs/triton_X_Y_Z/E=...,N=...,device_name=....json`
below $SGLANG_MOE_CONFIG_DIR, so tuned files need no patch. `..._down.json` beside it is of the down projection, which
takes the other file only where upstream knows none of its own: both are written.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Configs = dict[str, dict[str, Any]]
"""Number of tokens, as text -> configuration: the content of one file."""
FOLDER = "moe-configs"


def read_upstream(experts: int, hidden: int, width: int, top_k: int, tokens: Sequence[int]) -> dict[str, Configs]:
    """Files of a bfloat16 shape, by path below `configs/`, with which upstream chooses as it does without them: at
    `tokens`, and at every number beyond the last of them, by its heuristic where it has no file. The first is of the up
    projection, the second of the down projection.
    """
    import triton
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config as upstream

    def choose(rows: int) -> tuple[dict[str, Any], dict[str, Any]]:
        shapes = (experts, 2 * width, hidden), (experts, hidden, width)
        up, (down, _) = upstream.try_get_optimal_moe_config(*shapes, top_k, None, rows, return_down_config=True)
        return dict(up), dict(down or up)

    keys = [upstream.get_moe_configs(experts, width, None, 0, 0, down_moe=down) or () for down in (False, True)]
    last = max([*tokens, experts, *keys[0], *keys[1]]) + 1  # the heuristic changes at the number of experts
    chosen = {rows: choose(rows) for rows in [*tokens, *range(max(tokens) + 1, last + 1)]}
    kept = _keep_steps(chosen, max(tokens) + 1)
    folder = f"triton_{triton.__version__.replace('.', '_')}"
    names = [upstream.get_config_file_name(experts, width, None, down_moe=down) for down in (False, True)]
    return {f"{folder}/{name}": {str(rows): both[i] for rows, both in kept.items()} for i, name in enumerate(names)}


def merge(files: Mapping[str, Configs], tuned: Mapping[int, dict[str, Any] | None]) -> dict[str, Configs]:
    """The files with the tuned configurations for both projections; at None they stay as they are."""
    new = {str(rows): config for rows, config in tuned.items() if config is not None}
    merged = {path: {**configs, **new} for path, configs in files.items()}
    return {path: dict(sorted(configs.items(), key=lambda one: int(one[0]))) for path, configs in merged.items()}


def write_files(folder: Path, files: Mapping[str, Configs]) -> None:
    """Write files of `read_upstream` or `merge` into a folder for $SGLANG_MOE_CONFIG_DIR."""
    for name, configs in files.items():
        path = folder / "configs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(configs, indent=4) + "\n")


def _keep_steps(chosen: Mapping[int, Any], first: int) -> dict[int, Any]:
    """Of what is chosen from `first` up, both sides of each change, which choose the same; smaller numbers stay."""
    kept = {rows: one for rows, one in chosen.items() if rows <= first}
    for rows in range(first + 1, max(chosen) + 1):
        if chosen[rows] != chosen[rows - 1]:
            kept.update({rows - 1: chosen[rows - 1], rows: chosen[rows]})
    return kept
