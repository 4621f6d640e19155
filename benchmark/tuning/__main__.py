"""Measure how many experts tuning saves: `python -m benchmark.tuning [POLICY...]`.

Tunes a policy for several tolerances, as `sglang-xshare tune` does, on one part of the texts. Then decodes another part
with the tuned policies, and with published settings that are the same in all layers. The benchmark starts a server, or
decodes in its own process with `--offline`.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer

from benchmark.common.command import Parser, run_main, selecting
from benchmark.common.paths import BUILD, TRAINED
from benchmark.common.plot import draw
from benchmark.common.server import Server
from benchmark.quality.served import SERVER_ARGS
from benchmark.tuning.offline import OfflineGauge
from benchmark.tuning.report import describe, estimate_interval, find_saved, plot_tuning, tabulate_tuning
from sglang_xshare.parser import whole
from sglang_xshare.tune.command import GROUPS, SETTINGS
from sglang_xshare.tune.gauge import Gauge
from sglang_xshare.tune.measure import Bench, compare, hash_asked
from sglang_xshare.tune.plans import VANILLA_SETTING, Layers, build_policy, group_layers
from sglang_xshare.tune.search import ACTIVE, search
from sglang_xshare.tune.server import Server as RunningServer
from sglang_xshare.tune.texts import Sample, read_samples

PUBLISHED = (
    *(f"xshare:k0=1,add={add}" for add in range(2, 26, 2)),
    *(f"xshare:k0=2,add={add}" for add in (4, 8, 12)),
    *(f"oea:k0={k0}" for k0 in (1, 2, 3, 4)),
    *(f"oea:k0=4,p={p}" for p in (0.3, 0.4, 0.5, 0.6)),
    *(f"lynx-lat:retain={retain}" for retain in (32, 40, 48)),
)
"""The settings of the papers for decode steps, with several budgets each."""
EVERYWHERE: Layers = (0,)
ANOTHER = "another text"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the table and draw the picture."""
    parser = Parser("benchmark.tuning", __doc__)
    parser.add_policies(selecting, PUBLISHED, "published settings to compare with")
    text = "to choose from (default: tune's)"
    parser.add_argument("--settings", nargs="+", type=selecting, default=SETTINGS, help=text)
    parser.add_argument("--tolerances", nargs="+", type=_percent, default=[0.5, 1.0, 2.0], metavar="PERCENT")
    parser.add_numbers("batch", (16,), "requests of a step", whole(2))
    parser.add_checkpoint(TRAINED)
    text = "texts to tune on, as many to confirm, and twice as many to compare on (default: 80)"
    parser.add_argument("--samples", type=whole(2), default=80, metavar="N", help=text)
    parser.add_count("prompt", 32, "tokens of each that are prefilled")
    parser.add_count("tokens", 96, "tokens of each that are decoded")
    parser.add_argument("--offline", action="store_true", help="decode by transformers, without a server")
    parser.add_record(BUILD / "tuning")
    args = parser.parse_args(argv)
    if args.samples < max(args.batch):
        parser.error(f"--samples must be at least the largest batch, {max(args.batch)} (got {args.samples})")
    record = parser.open_record("tuning", args, argv)
    names = {batch: [f"{percent:g}%, {batch} rows" for percent in args.tolerances] for batch in args.batch}
    if any(name not in record for some in names.values() for name in some):
        with (open_offline if args.offline else open_server)(args) as (gauge, layers):
            groups, model = group_layers(layers, GROUPS), f"{'offline' if args.offline else 'served'}: {args.model}"
            trace = args.out / "trace.jsonl"
            args.out.mkdir(parents=True, exist_ok=True)
            if not args.resume:
                trace.unlink(missing_ok=True)
            bench = Bench(gauge, trace, hash_asked(model, groups, list(gauge.samples.values()), ACTIVE))
            for batch in args.batch:
                for name, point in measure(bench, groups, args, batch):
                    record.add(name, **point)
        bench.trace.unlink()
    tabulate_tuning(record.points).show(record.path)
    draw(plot_tuning(record.points), record.path.with_suffix(".png"))


Gauged = tuple[Gauge | OfflineGauge, Sequence[int]]
"""The object that measures a policy, and the numbers of the model's MoE layers."""


@contextmanager
def open_server(args: argparse.Namespace) -> Iterator[Gauged]:
    """Start a server of the model, and yield a gauge that measures policies on it."""
    # CUDA graphs are disabled, because the server would capture them again after some policy switches.
    flags = ("--expert-policy", "observe", "--disable-cuda-graph", *SERVER_ARGS)
    with Server(args.model, flags, name="tuning") as server:
        running = RunningServer(server.url)
        yield Gauge(running, read_parts(args, running.tokenize)), running.get_policy()["limits"]["moe_layers"]


@contextmanager
def open_offline(args: argparse.Namespace) -> Iterator[Gauged]:
    """Load the model into this process, and yield a gauge that measures policies on it."""
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    gauge = OfflineGauge(
        args.model, read_parts(args, lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    )
    yield gauge, gauge.layers


def read_parts(args: argparse.Namespace, tokenize: Callable[[str], list[int]]) -> dict[str, list[Sample]]:
    """Read the samples for tuning, for confirmation and for the comparison.

    The comparison has twice as many samples as each of the other parts.
    """
    texts = args.texts or args.model / "heldout"
    tuning, first, held_out, second = read_samples(texts, tokenize, args.prompt, args.tokens, args.samples, parts=4)
    return {"tuning": tuning, "held out": held_out, ANOTHER: first + second}


def measure(
    bench: Bench, groups: Sequence[Layers], args: argparse.Namespace, batch: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Tune for each tolerance, and yield the name and the fields of its point.

    A point contains the results of the tuned policy and of the published settings on another text. It also contains the
    confidence interval of the saved experts.
    """
    vanilla = bench.run({"policy": VANILLA_SETTING}, batch, ANOTHER)
    layers = sum(map(len, groups))
    published = {one: bench.run(build_policy({EVERYWHERE: one}), batch, ANOTHER) for one in args.policies}
    before = next(one.before for one in published.values() if one.before is not None)
    for setting, one in published.items():
        print(f"{batch} rows, {setting}: {compare(one, vanilla).delta:+.4f} nats", flush=True)
    others = [{"policy": name, **describe(one, vanilla, before, layers)} for name, one in published.items()]
    for percent in args.tolerances:
        tuned = search(bench, groups, args.settings, batch, percent / 100, lambda line: print(line, flush=True))
        point: dict[str, Any] = {"batch": batch, "tolerance": percent, "before": before, "published": others}
        point["cross_entropy"] = vanilla.cross_entropy
        if tuned.chosen:
            plan = build_policy(tuned.chosen.settings)
            found = bench.run(plan, batch, ANOTHER)
            point |= {"plan": plan, **describe(found, vanilla, before, layers)}
            if find_saved(point) is not None:
                point["saved_interval"] = estimate_interval(point, found, list(published.values()), vanilla)
        yield f"{percent:g}%, {batch} rows", point


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = 0.0
    if not 0 < value < 100:
        raise argparse.ArgumentTypeError(f"must be percents above 0 and below 100 (got {text!r})")
    return value


if __name__ == "__main__":
    run_main("tuning", main)
