"""Serve a model with the expert policy off and on, without drafts and with them: a small `benchmark.serving`.

Under the policy a layer loads fewer experts, so a step is faster and the server writes more tokens a second; the loss
hardly rises, and the sums stay right. The model is the shipped checkpoint with wider experts and the same function:
loading experts dominates a step, as on a GPU. The picture shows tokens/s and loss by row.
"""

from collections.abc import Sequence

from benchmark.common.command import run_main
from benchmark.common.paths import BUILD
from benchmark.common.variant import OFF
from benchmark.serving.__main__ import make_parser, run

POLICIES = (OFF, "xshare")
"""The policies, each without drafts and with drafts."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure one full batch a round, print the table, draw the picture."""
    parser = make_parser("benchmark.demo", __doc__, BUILD / "demo", per_domain=4, requests=16)
    run(parser, "demo", POLICIES, POLICIES, argv)


if __name__ == "__main__":
    run_main("demo", main)
