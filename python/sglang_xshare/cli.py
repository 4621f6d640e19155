"""`sglang-xshare policies` and `sglang-xshare patch ...`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code; a refusal is one line on stderr."""
    from .patching.cli import add_parser as add_patch_parser
    from .policies.cli import add_parser as add_policies_parser

    parser = argparse.ArgumentParser(
        prog="sglang-xshare", description="Batch-aware expert selection for Mixture-of-Experts decoding in SGLang."
    )
    commands = parser.add_subparsers(dest="group", required=True)
    add_policies_parser(commands)
    add_patch_parser(commands)
    args = parser.parse_args(argv)
    code: int = args.run(args)
    return code
