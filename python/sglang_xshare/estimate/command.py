"""The subcommand: its flags, its table, its exit code."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..gpus import GPUS, find_gpu

DESCRIPTION = "ESTIMATE what a policy would gain on a GPU, from bytes and memory bandwidth; nothing is measured"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `estimate`."""
    parser = subparsers.add_parser("estimate", help=DESCRIPTION, description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="a folder with the model's config.json"
    )
    parser.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)}")
    parser.add_argument("--bandwidth", type=float, metavar="GB/s", help="of the memory, in place of the GPU's peak")
    parser.add_argument("--batch", type=int, required=True, metavar="N", help="requests that decode together")
    parser.add_argument(
        "--policy", default="xshare", metavar="POLICY", help="such as xshare:k0=1,add=24 (default: xshare)"
    )
    parser.add_argument("--context", type=int, default=1024, metavar="TOKENS", help="cached a request (default: 1024)")
    parser.add_argument("--tokens-per-request", type=int, default=1, metavar="T", help="in speculative verification")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--trace", type=Path, metavar="FILE", help="active experts of a file of --expert-policy-trace")
    source.add_argument(
        "--active",
        type=float,
        nargs=2,
        metavar=("BEFORE", "AFTER"),
        help="active experts a layer and step, as you know them",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the estimate. Returns 0, or 1 for arguments that cannot be estimated."""
    from ..stage.start.refusal import ExpertPolicyError
    from .report import estimate, print_table

    try:
        report: dict[str, Any] = estimate(arguments, _read_bandwidth(arguments))
    except (ValueError, ExpertPolicyError) as error:
        own = str(error).replace("--speculative-algorithm", "--tokens-per-request T above 1")  # the server's flag
        print(f"estimate: {own}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print_table(report)
    return 0


def _read_bandwidth(arguments: argparse.Namespace) -> float:
    """GB/s. Raises ValueError where none is given, or a count is not positive."""
    for name in ("batch", "tokens_per_request", "bandwidth"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} {value}: allowed is a positive number")
    if arguments.context < 0:
        raise ValueError(f"--context {arguments.context}: allowed is 0 or more")
    if arguments.gpu is None and arguments.bandwidth is None:
        raise ValueError(f"--gpu is missing; allowed is one of {', '.join(GPUS)}, or --bandwidth")
    gpu = None if arguments.gpu is None else find_gpu(arguments.gpu)
    return float(arguments.bandwidth or (gpu.bandwidth if gpu else 0))
