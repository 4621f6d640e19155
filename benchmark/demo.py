"""Serve a model with and without the expert policy: a small version of `benchmark.serving`.

Under the policy, each layer loads fewer experts. So a step is faster, and the server generates more tokens per second.
The loss increases only a little, and the answers to arithmetic problems stay right. Both cases are also measured with
draft tokens. The model is the shipped checkpoint with wider experts but the same outputs. Loading the experts takes
most of the time of a step, as on a GPU. The picture shows the tokens per second and the loss of each case.
"""

from collections.abc import Sequence

from benchmark.common.command import run_main
from benchmark.common.paths import BUILD
from benchmark.common.variant import OFF
from benchmark.serving.__main__ import make_parser, run

POLICIES = (OFF, "xshare")
"""The policies. Each one is measured without and with draft tokens."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure one full batch in each round, print the table and draw the picture."""
    parser = make_parser("benchmark.demo", __doc__, BUILD / "demo", per_domain=4, requests=16)
    run(parser, "demo", POLICIES, POLICIES, argv)


if __name__ == "__main__":
    run_main("demo", main)
