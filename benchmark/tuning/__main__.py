"""How many experts tuning saves: `python -m benchmark.tuning [POLICY...]`.

Tunes a server of the model to several tolerances, as `sglang-xshare tune` does, on the first half of every text;
then decodes the second half under what it found and under published settings, fixed for all layers.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmark.common.command import Parser, folder, one_line_errors, policy, positive
from benchmark.common.paths import BUILD, TRAINED
from benchmark.common.server import Server
from benchmark.quality.served import SERVER_ARGS
from benchmark.tuning.report import plot_tuning, tabulate_tuning
from sglang_xshare.tune.command import GROUPS, SETTINGS
from sglang_xshare.tune.measure import Bench, Measurement, compare
from sglang_xshare.tune.plans import Layers, build_policy, group_layers
from sglang_xshare.tune.search import search
from sglang_xshare.tune.server import Server as RunningServer
from sglang_xshare.tune.texts import Sample, read_samples

PUBLISHED = (
    *(f"xshare:k0=1,add={add}" for add in (2, 4, 6, 8, 10, 12, 14, 16, 20)),
    *(f"oea:k0={k0}" for k0 in (1, 2, 3, 4)),
    *(f"lynx-lat:retain={retain}" for retain in (16, 24, 32)),
)
EVERYWHERE: Layers = (0,)
ANOTHER = "another text"
LONGEST = 1 << 20
"""Characters read of a text."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure into the record, print the table, draw the plot."""
    parser = Parser("benchmark.tuning", __doc__)
    text = f"published settings to compare with (default: {' '.join(PUBLISHED)})"
    parser.add_argument("policies", nargs="*", type=policy, default=PUBLISHED, help=text)
    parser.add_argument("--settings", nargs="+", type=policy, default=SETTINGS, help="to choose from (default: tune's)")
    parser.add_argument("--tolerances", nargs="+", type=_percent, default=[0.5, 1.0, 2.0], metavar="PERCENT")
    parser.add_argument("--batches", nargs="+", type=positive, default=[16], metavar="N", help="rows a step")
    parser.add_argument("--model", type=folder, default=TRAINED, help="a checkpoint (default: the shipped one)")
    parser.add_argument("--texts", type=folder, help="of *.txt (default: the model's heldout)")
    parser.add_count("samples", 80, "texts to tune on, as many to confirm, and twice as many to compare on")
    parser.add_count("prompt", 64, "tokens of each that are prefilled")
    parser.add_count("tokens", 64, "tokens of each that are decoded")
    parser.add_record(BUILD / "tuning")
    args = parser.parse_args(argv)
    record = parser.open_record("tuning", args, argv)
    names = {batch: [f"{percent:g}%, {batch} rows" for percent in args.tolerances] for batch in args.batches}
    if any(name not in record for some in names.values() for name in some):
        # Captured graphs would follow a switch of numbers, not one to another kind of policy.
        flags = ("--expert-policy", "observe", "--disable-cuda-graph", *SERVER_ARGS)
        with Server(args.model, flags, name="tuning") as server:
            running = RunningServer(server.url)
            samples = read_parts(args, running)
            bench = Bench(running, samples, open_trace(args.out, args.resume))
            groups = group_layers(running.get_policy()["limits"]["moe_layers"], GROUPS)
            for batch in args.batches:
                for name, point in measure(bench, groups, args, batch):
                    record.add(name, **point)
    tabulate_tuning(record.points).show()
    plot_tuning(args.out / "tuning.png", record.points, f"Tuned on one text, measured on another: {args.model.name}")
    print(f"Record: {record.path}, plot: {args.out / 'tuning.png'}")


def open_trace(folder: Path, resume: bool) -> Path:
    """The file of measurements already made, of which there are none unless it goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / "trace.jsonl"
    if not resume:
        trace.unlink(missing_ok=True)
    return trace


def read_parts(args: argparse.Namespace, server: RunningServer) -> dict[str, Sequence[Sample]]:
    """Samples to tune on and to confirm with from the first half of every text, others from the second half."""
    texts = args.texts or args.model / "heldout"
    halves: list[tuple[list[Sample], list[Sample]]] = []
    with TemporaryDirectory() as scratch:
        for half in (0, 1):
            place = Path(scratch) / str(half)
            place.mkdir()
            for file in sorted(texts.glob("*.txt")):
                text = file.read_text(errors="replace")[:LONGEST]
                middle = text.rindex("\n", 0, len(text) // 2) + 1 if "\n" in text[: len(text) // 2] else len(text) // 2
                (place / file.name).write_text(text[:middle] if half == 0 else text[middle:])
            halves.append(read_samples(place, server.tokenize, args.prompt, args.tokens, args.samples))
    (tuning, held_out), (first, second) = halves
    return {"tuning": tuning, "held out": held_out, ANOTHER: first + second}


def measure(
    bench: Bench, groups: Sequence[Layers], args: argparse.Namespace, batch: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, point) of each tolerance: what was found, and on another text its loss and experts, and those of the
    published settings. Losses are fields of `Loss`, experts those of a layer and step.
    """
    vanilla = bench.run({"policy": "vanilla"}, batch, ANOTHER)
    layers = sum(map(len, groups))
    published = []
    before = 0.0
    for setting in args.policies:
        found = bench.run(build_policy({EVERYWHERE: setting}), batch, ANOTHER)
        before = before or found.before or 0.0
        published.append({"policy": setting, **_describe(found, vanilla, before, layers)})
        print(f"{batch} rows, {setting}: {published[-1]['experts']:.1f} experts", flush=True)
    for percent in args.tolerances:
        tuned = search(bench, groups, args.settings, batch, percent / 100, lambda line: print(line, flush=True))
        point: dict[str, Any] = {"batch": batch, "tolerance": percent, "before": before, "published": published}
        point["cross_entropy"] = vanilla.cross_entropy
        if tuned.chosen:
            plan = build_policy(tuned.chosen.settings)
            point |= {"plan": plan, **_describe(bench.run(plan, batch, ANOTHER), vanilla, before, layers)}
        yield f"{percent:g}%, {batch} rows", point


def _describe(found: Measurement, vanilla: Measurement, before: float, layers: int) -> dict[str, Any]:
    experts = before - (found.saved or 0.0) / layers
    return {"experts": experts, "kept_mass": found.kept_mass, "loss": asdict(compare(found, vanilla))}


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = 0.0
    if not 0 < value < 100:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are percents above 0 and below 100")
    return value


if __name__ == "__main__":
    with one_line_errors("tuning"):
        main()
