"""The subcommand: its flags, its table, its exit code."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..gpus import GPUS, find_gpu

LOWEST = {"batch": 1, "draft_tokens": 1, "context": 0, "ep_size": 1, "bandwidth": 0.001}
HIGHEST = 1_000_000_000
"""Of every number that is given: what is computed of them stays finite."""
DESCRIPTION = "ESTIMATE what a policy would gain on a GPU, from bytes and memory bandwidth; nothing is measured"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `estimate`."""
    parser = subparsers.add_parser("estimate", help=DESCRIPTION, description=DESCRIPTION, allow_abbrev=False)
    policies = "such as xshare:k0=1,add=24 (default: xshare)"
    parser.add_argument("policies", nargs="*", default=["xshare"], metavar="POLICY", help=policies)
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="a folder with the model's config.json"
    )
    parser.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)}")
    parser.add_argument("--bandwidth", type=float, metavar="GB/s", help="of the memory, in place of the GPU's peak")
    parser.add_argument("--batch", type=int, required=True, metavar="N", help="requests that decode together")
    parser.add_argument("--context", type=int, default=1024, metavar="TOKENS", help="cached a request (default: 1024)")
    verified = "that speculation verifies a request (default: 1, no speculation)"
    parser.add_argument("--draft-tokens", type=int, default=1, metavar="N", help=verified)
    ranks = "expert-parallel ranks, each with whole experts and requests of its own (default: 1)"
    parser.add_argument("--ep-size", type=int, default=1, metavar="N", help=ranks)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--trace", type=Path, metavar="FILE", help="active experts of a file of --expert-policy-trace")
    known = "active experts a layer and step, as you know them of one policy; with --ep-size the fullest rank's"
    source.add_argument("--active", type=float, nargs=2, metavar=("BEFORE", "AFTER"), help=known)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the estimate. Returns 0, or 1 for arguments that cannot be estimated."""
    from .report import estimate, print_table

    try:
        _check_numbers(arguments)
        report: dict[str, Any] = estimate(arguments, _read_bandwidth(arguments))
    except ValueError as error:
        print(f"estimate: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print_table(report)
    return 0


def _check_numbers(arguments: argparse.Namespace) -> None:
    for name, low in LOWEST.items():
        value = getattr(arguments, name)
        if value is not None and not low <= value <= HIGHEST:
            raise ValueError(f"--{name.replace('_', '-')} {value}: allowed is {low} to {HIGHEST:,}")


def _read_bandwidth(arguments: argparse.Namespace) -> float:
    """In GB/s. Raises ValueError where none is given."""
    if arguments.gpu is None and arguments.bandwidth is None:
        raise ValueError(f"--gpu is missing; allowed is one of {', '.join(GPUS)}, or --bandwidth")
    gpu = None if arguments.gpu is None else find_gpu(arguments.gpu)
    return float(arguments.bandwidth or (gpu.bandwidth if gpu else 0))
