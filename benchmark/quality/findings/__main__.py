"""The papers' findings, looked for in a small model: `python -m benchmark.quality.findings [FINDING...]`."""

from collections.abc import Callable, Sequence

from benchmark.common.command import Parser, one_line_errors
from benchmark.common.paths import BUILD
from benchmark.quality.decoding import add_decoding, read_decoding
from benchmark.quality.findings.finding import Finding, Study
from benchmark.quality.findings.mixed_batch import find_mixed_batch
from benchmark.quality.findings.overlap import find_overlap
from benchmark.quality.findings.per_request import find_per_request
from benchmark.quality.findings.report import keep_finding, tabulate_findings
from benchmark.quality.findings.tree_size import find_tree_size

FINDINGS: dict[str, Callable[[Study], Finding]] = {
    "overlap": find_overlap,
    "tree-size": find_tree_size,
    "per-request": find_per_request,
    "mixed-batch": find_mixed_batch,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure into the record, print tables and verdicts, write the plots."""
    parser = Parser("benchmark.quality.findings", __doc__)
    names = f"{', '.join(FINDINGS)} (default: all)"
    parser.add_argument("findings", nargs="*", metavar="FINDING", default=tuple(FINDINGS), help=names)
    add_decoding(parser, batch=4, tokens_per_request=4)
    parser.add_record(BUILD / "quality" / "findings")
    args = parser.parse_args(argv)
    for name in args.findings:
        if name not in FINDINGS:
            parser.error(f"finding {name!r}: allowed are {', '.join(FINDINGS)}")
    decoding = read_decoding(args)
    record = parser.open_record("findings", args, argv)
    missing = [name for name in args.findings if name not in record]
    if missing:
        study = Study(*decoding.load(), decoding.prompt, decoding.layout)
        for name in missing:
            print(f"{name} ...", flush=True)
            keep_finding(FINDINGS[name](study), record, args.out)
    tabulate_findings(record.points).show()
    print(f"Record: {record.path}, plots beside it")


if __name__ == "__main__":
    with one_line_errors("findings"):
        main()
