"""Measure active experts on expert-parallel ranks: `python -m benchmark.balance [POLICY...]`.

Selects experts for random logits with the shape of DeepSeek-R1 on 8 ranks. The logits are fitted to XShare's Table 2.
A policy is spelt as in `python -m benchmark.serving`. Policies that are joined with "/" are used in turn. The first
policy is the baseline.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmark.balance.logits import FITTED, measure_plans
from benchmark.balance.report import tabulate_balance
from benchmark.common.command import Parser, run_main
from benchmark.common.paths import BUILD
from benchmark.common.sweep import fill
from benchmark.common.variant import PLAN_SPELLING, parse_plan

FILL = "xshare:k0={},target_per_rank={},balance=fill"
POLICIES = (
    "vanilla",
    "xshare:k0=1,target_per_rank=5",
    *(FILL.format(1, target) for target in (5, 6, 7)),
    *(FILL.format(0, target) for target in (4, 5, 6, 7)),
    f"{FILL.format(0, 5)}/{FILL.format(0, 6)}",
    "xshare:k0=1,target_per_rank=5,balance=level",
    *(f"oea:k0=1{more}" for more in ("", ",target_per_rank=1", ",target_per_rank=5")),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the table."""
    parser = Parser("benchmark.balance", __doc__)
    parser.add_policies(_policies, POLICIES, f"{PLAN_SPELLING}; several in turn with / between")
    parser.add_argument("--batch", nargs="+", type=int, choices=FITTED, default=list(FITTED), help="requests of a step")
    parser.add_count("batches", 400, "steps of each size")
    parser.add_record(BUILD / "balance")
    args = parser.parse_args(argv)
    record = parser.open_record("balance", args, argv)
    torch.set_num_threads(1)

    def measure(policies: str) -> dict[str, Any]:
        plans = [parse_plan(policy) for policy in policies.split("/")]
        return {"rows": {str(rows): measure_plans(plans, FITTED[rows], args.batches) for rows in args.batch}}

    fill(record, {policies: partial(measure, policies) for policies in args.policies})
    tabulate_balance(record.points).show(record.path)


def _policies(text: str) -> str:
    for policy in text.split("/"):
        try:
            parse_plan(policy)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text


if __name__ == "__main__":
    run_main("balance", main)
