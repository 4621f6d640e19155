"""The verb `prune`: its flags, its progress, its exit code."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

DESCRIPTION = "write a checkpoint with only the best experts of a fixed order in every layer"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `prune`."""
    parser = subparsers.add_parser("prune", help=DESCRIPTION, description=DESCRIPTION, allow_abbrev=False)
    flag = parser.add_argument
    flag("--model", type=Path, required=True, metavar="DIR", help="a folder with a checkpoint in safetensors")
    order = parser.add_mutually_exclusive_group(required=True)
    order.add_argument("--order", type=Path, metavar="FILE", help="JSON: expert ids, best first, or keys of moe-spec")
    order.add_argument("--texts", type=Path, metavar="DIR", help="*.txt on which to count how often each is chosen")
    flag("--keep", type=int, required=True, metavar="N", help="experts of each layer that are left")
    flag("--out", type=Path, required=True, metavar="DIR", help="the pruned checkpoint; not there yet, or empty")
    flag("--length", type=int, default=256, metavar="N", help="tokens of --texts read at once (default: 256)")
    most = "tokens of each of --texts at most (default: 100000)"
    flag("--tokens", type=int, default=100_000, metavar="N", help=most)
    flag("--device", metavar="NAME", help="where the model reads --texts (default: cuda where there is one)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is half written goes, too
    try:
        prune(arguments)
    except (ValueError, OSError, RuntimeError) as error:  # `ExpertPolicyError` is a ValueError
        print(f"prune: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"prune: interrupted; nothing is left at {arguments.out}", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, former)
    return 0


def prune(arguments: argparse.Namespace) -> None:
    """Check, order, write. Raises ValueError in one line for what cannot be pruned, before anything is written."""
    # They import torch, for which the other verbs need not wait.
    from .checkpoint import ORDERS, check_out, write_pruned
    from .order import read_orders
    from .source import read_source

    for name in ("length", "tokens"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} {getattr(arguments, name)}: allowed is a whole number above 0")
    source = read_source(arguments.model)
    top_k, experts = source.model.top_k, source.model.num_experts
    if not top_k <= arguments.keep < experts:
        raise ValueError(f"--keep {arguments.keep}: allowed is {top_k}, the model's top-k, to {experts - 1}")
    check_out(source, arguments.out)
    orders = read_orders(arguments.order, source, arguments.keep) if arguments.order else _count(arguments, source)
    size = write_pruned(source, orders, arguments.keep, arguments.out, lambda names: _track(names, "writing"))
    print(f"{arguments.out}: {arguments.keep} of {experts} experts in {len(orders)} layers, {size / 2**20:.1f} MiB")
    print(f"{arguments.out / ORDERS}: as --expert-policy moe-spec takes it, for the whole model")


def _count(arguments: argparse.Namespace, source: Any) -> Any:
    import torch

    from ..affinity.calibration import read_texts
    from .order import count_orders

    pieces, _ = read_texts(arguments.texts, arguments.model, arguments.length, arguments.tokens)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return count_orders(source, pieces, device, lambda batches: _track(batches, "reading"))


def _track(items: Sequence[Any], what: str) -> Iterator[Any]:
    from rich.progress import track

    yield from track(items, description=what)
