"""The papers' findings, looked for in a small model: `python -m benchmark.quality.findings [FINDING...]`."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from benchmark.common.paths import ROOT
from benchmark.quality.findings.finding import Finding, Study
from benchmark.quality.findings.mixed_batch import find_mixed_batch
from benchmark.quality.findings.overlap import find_overlap
from benchmark.quality.findings.per_request import find_per_request
from benchmark.quality.findings.tree_size import find_tree_size
from benchmark.quality.report import print_table, write_record
from benchmark.quality.workload import add_workload_flags, read_workload

OUT = ROOT / "build" / "quality" / "findings"
FINDINGS: dict[str, Callable[[Study], Finding]] = {
    "overlap": find_overlap,
    "tree-size": find_tree_size,
    "per-request": find_per_request,
    "mixed-batch": find_mixed_batch,
}
WORDS = {True: "agrees", False: "differs", None: "open"}


def main() -> None:
    """Measure, print tables and verdicts, write the record and the plots."""
    args = _parse_args()
    try:
        workload = read_workload(args)
        study = Study(*workload.load(), workload.prompt, workload.layout)
        findings = [_look_for(name, study, args.out) for name in args.findings or FINDINGS]
    except ValueError as error:
        sys.exit(f"error: {error}")
    verdicts = [(finding, verdict) for finding in findings for verdict in finding.verdicts]
    rows = [[one.source, verdict.claim, verdict.measured, WORDS[verdict.agrees]] for one, verdict in verdicts]
    print_table(
        f"The papers' claims, and {args.model.name}", ["paper", "claim", "measured here", ""], rows, text_columns=4
    )
    record = [
        {"name": one.name, "source": one.source, "numbers": one.numbers, "verdicts": [asdict(v) for v in one.verdicts]}
        for one in findings
    ]
    write_record(args.out / "findings.json", sys.argv, workload=asdict(workload), findings=record)
    print(f"record: {args.out / 'findings.json'}, plots beside it")


def _look_for(name: str, study: Study, out: Path) -> Finding:
    print(f"{name} ...", flush=True)
    finding = FINDINGS[name](study)
    print_table(f"{finding.title} ({finding.source})", finding.headings, finding.rows)
    out.mkdir(parents=True, exist_ok=True)
    finding.figure.savefig(out / f"{finding.name}.png", dpi=120)
    return finding


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmark.quality.findings", description=__doc__)
    parser.add_argument("findings", nargs="*", metavar="FINDING", help=f"{', '.join(FINDINGS)} (default: all)")
    add_workload_flags(parser, batch=4, tokens_per_request=4)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results (default: %(default)s)")
    args = parser.parse_args()
    for name in args.findings:
        if name not in FINDINGS:
            parser.error(f"finding {name!r}: allowed are {', '.join(FINDINGS)}")
    return args


if __name__ == "__main__":
    main()
