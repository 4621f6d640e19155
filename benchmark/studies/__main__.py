"""The papers' own studies on a small model: `python -m benchmark.studies [oea|xshare|lynx|moe-spec]`."""

from collections.abc import Callable, Sequence
from dataclasses import asdict

from benchmark.common.command import Parser, one_line_errors
from benchmark.common.paths import BUILD
from benchmark.common.plot import save_figure
from benchmark.common.table import Table
from benchmark.quality.decoding import add_decoding, read_decoding
from benchmark.quality.findings.finding import Finding
from benchmark.quality.findings.report import tabulate_findings
from benchmark.studies.lab import Lab
from benchmark.studies.lynx import study_lynx
from benchmark.studies.moe_spec import study_moe_spec
from benchmark.studies.oea import study_oea
from benchmark.studies.xshare import study_xshare

STUDIES: dict[str, Callable[[Lab], Finding]] = {
    "oea": study_oea,
    "xshare": study_xshare,
    "lynx": study_lynx,
    "moe-spec": study_moe_spec,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure into the record, print tables and verdicts, write the plots."""
    parser = Parser("benchmark.studies", __doc__)
    names = f"{', '.join(STUDIES)} (default: all)"
    parser.add_argument("studies", nargs="*", metavar="STUDY", default=tuple(STUDIES), help=names)
    add_decoding(parser, per_domain=16, tokens_per_request=32)
    parser.add_record(BUILD / "studies")
    args = parser.parse_args(argv)
    for name in args.studies:
        if name not in STUDIES:
            parser.error(f"study {name!r}: allowed are {', '.join(STUDIES)}")
    decoding = read_decoding(args)
    record = parser.open_record("studies", args, argv)
    missing = [name for name in args.studies if name not in record]
    if missing:
        lab = Lab(*decoding.load(), decoding)
        for name in missing:
            print(f"{name} ...", flush=True)
            found = STUDIES[name](lab)
            Table(f"{found.title} ({found.source})", found.headings, found.rows).show()
            save_figure(found.figure, args.out / f"{found.name}.png")
            verdicts = [asdict(verdict) for verdict in found.verdicts]
            record.add(name, source=found.source, numbers=found.numbers, verdicts=verdicts)
    tabulate_findings(record.points).show()
    print(f"Record: {record.path}, plots beside it")


if __name__ == "__main__":
    with one_line_errors("studies"):
        main()
