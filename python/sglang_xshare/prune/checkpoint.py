"""Writes a pruned checkpoint: files one after another, and under its name only when it is whole."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from ..stage.upstream.configuration import NUM_EXPERTS
from .order import Orders, format_orders
from .source import EXPERT, INDEX, ROUTER, Source, list_parts

ORDERS = "moe-spec.json"
"""The file with the orders, as `moe-spec` takes them for the whole model."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", INDEX)
"""What is not copied: other formats would hold all experts."""


def write_pruned(
    source: Source,
    orders: Orders,
    keep: int,
    out: Path,
    progress: Callable[[Sequence[str]], Iterator[str]] = iter,
) -> int:
    """Write `source` with the best `keep` experts of each order to `out`, in the order of their ids. One file's tensors
    are in memory at a time. Returns the bytes of the tensors written. Raises ValueError where something is there.
    """
    check_out(source, out)
    kept = {source.blocks[layer]: sorted(order[:keep]) for layer, order in orders.items()}
    with _folder(out) as half:
        shutil.copytree(
            source.folder, half, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*WEIGHTS, ".git", ".cache")
        )
        config = orjson.loads((source.folder / "config.json").read_bytes())
        _change_config(config, source.model.num_experts, keep)
        _write_json(half / "config.json", config)
        (half / ORDERS).write_bytes(orjson.dumps(format_orders(orders, keep), option=orjson.OPT_APPEND_NEWLINE))
        sizes = [_write_shard(source, name, kept, half) for name in progress(list(source.shards))]
        if (source.folder / INDEX).is_file():
            index = {"metadata": {"total_size": sum(size for _, size in sizes)}}
            places = {name: file for file, (names, _) in zip(source.shards, sizes, strict=True) for name in names}
            _write_json(half / INDEX, index | {"weight_map": places})
    return sum(size for _, size in sizes)


def check_out(source: Source, out: Path) -> None:
    """Raise ValueError for a folder that cannot be written, or that holds something."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out}: something is there; allowed is a folder that is empty or not there yet")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: no folder {out.parent}; allowed is a folder in one")
    if source.folder.resolve() in out.resolve().parents:
        raise ValueError(f"--out {out}: inside --model {source.folder}; allowed is a folder beside it")


@contextmanager
def _folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its name in the end, or is removed."""
    half = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        half.chmod(0o755)  # mkdtemp's is its owner's alone
        yield half
        half.rename(out)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise


def _write_shard(source: Source, name: str, kept: dict[str, list[int]], half: Path) -> tuple[list[str], int]:
    """(the tensors of one file that are left, their bytes). No file without any."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    tensors = {}
    with safe_open(source.folder / name, framework="pt") as file:
        for old in source.shards[name]:
            new, rows = rename(old, kept)
            if new is not None:
                tensor = file.get_tensor(old)
                tensors[new] = tensor if rows is None else tensor[rows].contiguous()
        if tensors:
            save_file(tensors, half / name, metadata=file.metadata())
            shutil.copymode(source.folder / name, half / name)  # safetensors' is its owner's alone
    return list(tensors), sum(tensor.nbytes for tensor in tensors.values())


def rename(name: str, kept: dict[str, list[int]]) -> tuple[str | None, list[int] | None]:
    """(a tensor's name in the pruned checkpoint, None for a lost expert's; the rows that it keeps, None for all).

    `kept` are the ids of experts by block, ascending.
    """
    if found := EXPERT.fullmatch(name):
        experts, number = kept[found["block"]], int(found["expert"])
        return (f"{found['block']}experts.{experts.index(number)}.{found['rest']}" if number in experts else None), None
    for block, experts in kept.items():
        if name.startswith(block) and name.removeprefix(block) in ROUTER:
            return name, experts
    return name, None


def _change_config(config: dict[str, Any], num_experts: int, keep: int) -> None:
    for part in list_parts(config):
        for name in NUM_EXPERTS:
            if part.get(name) == num_experts:
                part[name] = keep
        # As many groups chosen as there are choose nothing, but need as many experts each.
        if (part.get("n_group") or 1) > 1:
            part["n_group"] = part["topk_group"] = 1


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.unlink(missing_ok=True)  # a copy keeps its source's permissions, which may be to read alone
    file.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
