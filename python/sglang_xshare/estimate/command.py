"""The subcommand: its flags, its table, its exit code."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..gpus import GPUS, find_gpu
from .deployment import ATTENTIONS, PLACEMENTS, Deployment
from .latency import FAR, NEAR, Link, gpu_machine
from .machine import Machine, read_machine

LOWEST = {"batch": 1, "tokens_per_request": 1, "replicas": 1, "context": 0, "bandwidth": 0.001, "tflops": 0.001}
HIGHEST = 1_000_000_000
"""Of every number that is given: what is computed of them stays finite."""
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
        help="active experts a layer and step, as you know them; of whole experts on --ranks, the fullest rank's",
    )
    _add_deployment(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run)


def _add_deployment(parser: argparse.ArgumentParser) -> None:
    """Flags of more than one GPU."""
    group = parser.add_argument_group("many devices (docs/many-devices.md)")
    machine = "constants of --gpu's place, as benchmark.cost.model fits and writes them"
    group.add_argument("--machine", type=Path, metavar="FILE", help=machine)
    group.add_argument("--tflops", type=float, metavar="N", help="10^12 operations/s of experts (default: left out)")
    group.add_argument("--replicas", type=int, default=1, metavar="N", help="that share the batch (default: 1)")
    group.add_argument("--ranks", type=int, default=1, metavar="N", help="of each replica (default: 1)")
    group.add_argument("--node", type=int, default=8, metavar="N", help="ranks of a node at most (default: 8)")
    group.add_argument("--placement", choices=PLACEMENTS, default="ep", help="experts whole or in slices (default: ep)")
    rows = "rows go to their experts' ranks and back (default: all rows to all ranks)"
    group.add_argument("--all-to-all", action="store_true", help=rows)
    group.add_argument("--attention", choices=ATTENTIONS, default="data", help="parallel by rows or heads")
    link = "microseconds of an exchange and GB/s that a rank sends, within a node"
    group.add_argument("--near", type=float, nargs=2, metavar=("US", "GB/s"), help=f"{link} (default: DeepEP's)")
    group.add_argument("--far", type=float, nargs=2, metavar=("US", "GB/s"), help="the same between nodes")
    saves = "share of active experts that expert affinity saves over round robin, as you measured it"
    group.add_argument("--affinity-saves", type=float, default=0.0, metavar="SHARE", help=saves)


def run(arguments: argparse.Namespace) -> int:
    """Print the estimate. Returns 0, or 1 for arguments that cannot be estimated."""
    from .report import estimate, print_table

    try:
        _check_numbers(arguments)
        machine, bandwidth = _read_machine(arguments)
        report: dict[str, Any] = estimate(arguments, machine, _read_deployment(arguments), bandwidth)
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
    if not 0 <= arguments.affinity_saves < 1:
        raise ValueError(f"--affinity-saves {arguments.affinity_saves:g}: allowed is 0 or more, and less than 1")
    if arguments.affinity_saves and (arguments.active or arguments.trace):
        given = "--active" if arguments.active else "--trace"
        raise ValueError(f"--affinity-saves with {given}: its experts are as counted; allowed is one of both")
    for name in ("near", "far"):
        latency, bandwidth = getattr(arguments, name) or (0, 1)
        if not (0 <= latency <= HIGHEST and 0.001 <= bandwidth <= HIGHEST):
            allowed = f"0 to {HIGHEST:,} us, and 0.001 to {HIGHEST:,} GB/s"
            raise ValueError(f"--{name} {latency:g} {bandwidth:g}: allowed are {allowed}")


def _read_deployment(arguments: argparse.Namespace) -> Deployment:
    names = ("ranks", "node", "placement", "all_to_all", "attention")
    return Deployment(**{name: getattr(arguments, name) for name in names})


def _read_machine(arguments: argparse.Namespace) -> tuple[Machine, float | None]:
    """The machine, and the bandwidth in GB/s that it was made of. Raises ValueError where none is given."""
    if arguments.machine is not None:
        for name in ("gpu", "bandwidth", "tflops", "near", "far"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name} with --machine: the file has it; allowed is one of both")
        return read_machine(arguments.machine), None
    if arguments.gpu is None and arguments.bandwidth is None:
        raise ValueError(f"--gpu is missing; allowed is one of {', '.join(GPUS)}, or --bandwidth")
    gpu = None if arguments.gpu is None else find_gpu(arguments.gpu)
    bandwidth = float(arguments.bandwidth or (gpu.bandwidth if gpu else 0))
    near, far = (
        known if given is None else Link(given[0] * 1e-6, given[1] * 1e9)
        for given, known in ((arguments.near, NEAR), (arguments.far, FAR))
    )
    flops = None if arguments.tflops is None else arguments.tflops * 1e12
    return gpu_machine(bandwidth * 1e9, flops, near, far), bandwidth
