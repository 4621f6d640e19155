"""Measurements of the speed and the quality of served policies, on the same servers."""

import argparse
from collections.abc import Sequence

from benchmark.common.command import COUNTS, Parser
from benchmark.common.comparison import is_measured, measure
from benchmark.common.record import Record
from benchmark.common.rounds import Workload, serve, switch
from benchmark.common.variant import Variant
from benchmark.common.widened import prepare
from benchmark.quality.served import SERVER_ARGS, measure_nats, measure_sums
from benchmark.quality.text import load_sequences
from benchmark.serving.report import KEY, quality_key
from sglang_xshare.parser import whole

PROMPT = 32
"""The number of prompt tokens, whose loss is not measured."""


def add_text(parser: Parser, per_domain: int = 24, loss_tokens: int = 64, sums: int = 160) -> None:
    """Add flags for the held-out text and for the number of arithmetic problems."""
    parser.add_count("per_domain", per_domain, "sequences of each domain whose loss is measured")
    parser.add_argument("--skip", type=whole(0), default=0, metavar="N", help="sequences of each domain to skip first")
    parser.add_count("loss_tokens", loss_tokens, "tokens of each sequence whose loss is measured")
    parser.add_count("sums", sums, "arithmetic problems")


def measure_serving(
    record: Record, args: argparse.Namespace, variants: Sequence[Variant], flags: Sequence[str] = ()
) -> None:
    """Measure the speed and the quality of all variants, except what the record already contains.

    `args` must contain the flags of `add_checkpoint`, `add_counts` and `add_text`, and the `seed` of the prompts.
    `flags` are additional flags of every server. Variants with own flags use speculative decoding. Raises ValueError
    before a server starts if the text is too short.
    """
    model, texts = args.model, args.texts
    keys = [quality_key(variant.name) for variant in variants]
    if is_measured(record, KEY) and all(key in record for key in keys):
        return
    counts = {name: getattr(args, name) for name in COUNTS}
    workload = Workload(model, texts, seed=args.seed, **counts)
    own = prepare(model)
    tokens = load_sequences(texts, model, PROMPT + args.loss_tokens + 1, args.per_domain, args.skip).mix().tokens
    with serve(model, variants, [*own, *SERVER_ARGS, *flags]) as servers:
        measure(record, KEY, workload, variants, servers)
        for variant, server, key in zip(variants, servers, keys, strict=True):
            if key in record:
                continue
            switch(server, variant, servers)
            nats = measure_nats(server, tokens, PROMPT, workload.concurrency, verified=bool(variant.args)).mean(1)
            record.add(key, nats=nats.tolist(), sums=measure_sums(server, texts, args.sums))
            print(f"{variant.name}: {nats.mean():.3f} nats a token", flush=True)
