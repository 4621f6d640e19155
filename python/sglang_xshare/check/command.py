"""The subcommand: its flags, its table, its exit code."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..gpus import NVIDIA, Gpu, find_gpu
from ..patching.errors import PatchError

DESCRIPTION = "how a server with these flags would start: refusals, warnings, what auto becomes; nothing is started"
EPILOG = """All flags but these are the server's own. Weights are not needed, a config.json is; nothing is downloaded.
Exit code: 0 where the server would be served, 1 where it would be refused."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `check`, which passes unknown flags on to SGLang."""
    usage = "sglang-xshare check --model DIR [--gpu NAME] [--json] [flags of the server]"
    parser = subparsers.add_parser(
        "check", help=DESCRIPTION, description=DESCRIPTION, epilog=EPILOG, usage=usage, allow_abbrev=False
    )
    resolved = f"resolve for one of {', '.join(NVIDIA)} (default: this machine); needs SGLang 0.5.19 or later"
    parser.add_argument("--gpu", metavar="NAME", help=resolved)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run, server_flags=[])


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Returns 0 where the server would be served, else 1."""
    try:
        report = check(arguments.server_flags, arguments.gpu)
    except (ValueError, PatchError) as error:
        print(f"check: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        _print_table(report)
    return 0 if report["served"] else 1


def check(flags: Sequence[str], gpu_name: str | None) -> dict[str, Any]:
    """The report for a server's flags, as JSON would have it.

    Raises ValueError or PatchError, one line, where there is nothing to report on: an unknown GPU, no configuration, an
    SGLang that is absent or not patched, flags that its parser does not take.
    """
    gpu = None if gpu_name is None else find_gpu(gpu_name, NVIDIA)
    if gpu and gpu.capability is None:
        raise ValueError("--gpu: SGLang decides for AMD's GPUs when it is imported; allowed is NVIDIA's, or none")
    # SGLang and huggingface_hub read it when they are imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    _check_config(flags)
    from ..patching.status import check_patched
    from ..patching.tree import find_tree

    check_patched()
    from .report import describe
    from .resolve import resolve

    return {"sglang": find_tree(None).release, "gpu": gpu_name, **describe(resolve(_on_device(flags, gpu), gpu))}


def _on_device(flags: Sequence[str], gpu: Gpu | None) -> list[str]:
    """The flags with `--device cuda` where a GPU is asked for and none is at hand. Raises ValueError for another."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device")
    parser.add_argument("--config", type=Path)
    given = parser.parse_known_args(flags)[0]
    device = given.device or _read_device(given.config)
    if gpu is None or device == "cuda":
        return list(flags)
    if device is not None:
        raise ValueError(f"--device {device} with --gpu: allowed is cuda, or either alone")
    return [*flags, "--device", "cuda"]


def _read_device(config: Path | None) -> str | None:
    """The device that a server's configuration file names; what is wrong with the file SGLang says."""
    import yaml  # type: ignore[import-untyped]

    try:
        return (yaml.safe_load(config.read_text()) or {}).get("device") if config else None
    except (OSError, AttributeError, yaml.YAMLError):
        return None


def _check_config(flags: Sequence[str]) -> None:
    """Raise ValueError for a model without config.json, in its folder or in Hugging Face's cache."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", "--model")
    model = parser.parse_known_args(flags)[0].model_path
    if model is None or (Path(model) / "config.json").is_file():
        return
    if not Path(model).exists() and _is_cached(model):
        return
    raise ValueError(f"--model {model}: no config.json; allowed is a folder that has one, or a model that is cached")


def _is_cached(model: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(model, "config.json"), str)
    except HFValidationError:
        return False


def _print_table(report: dict[str, Any]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from ..console import open_console
    from .report import list_rows

    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in list_rows(report):
        table.add_row(name, escape(str(text)))
    open_console().print(table)
