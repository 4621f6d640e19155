"""A SGLang plugin that has the second rank of one replica select by another policy, once the file named by $DISAGREE is
there.
"""

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from served.answers import install_plugin


def put(scratch: Path) -> dict[str, str]:
    """Put the plugin where `install_probe` puts its own. Returns what the server's environment needs."""
    install_plugin(scratch, "served.disagree:install")
    return {"DISAGREE": str(scratch / "disagree")}


def install() -> None:
    """Called by upstream's `load_plugins()` in every process; only a scheduler's runs a model."""
    if multiprocessing.parent_process() is None:
        return
    from sglang_xshare.policies.schedule import build_schedule
    from sglang_xshare.stage.stage import Stage
    from sglang_xshare.upstream.ranks import find_rank

    file, begin_forward = Path(os.environ["DISAGREE"]), Stage.begin_forward

    def change_and_begin(stage: Stage, forward_batch: Any) -> Any:
        if find_rank()[0] == 1 and take(file):
            other = build_schedule("xshare", {"k0": 1, "add": 0}, speculative=False)
            stage.in_force = replace(stage.in_force, schedule=other)
        return begin_forward(stage, forward_batch)

    setattr(Stage, "begin_forward", change_and_begin)  # noqa: B010 - mypy knows a method


def take(file: Path) -> bool:
    """Whether the file was there, for one process alone."""
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    return True
