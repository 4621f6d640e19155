"""The common parts of the benchmarks' command lines: flags, their types, and one line for every error."""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from benchmark.common.record import Record
from benchmark.common.variant import BASELINE, parse_variant

# Flag, default and help of the counts of a served workload.
COUNTS = {
    "rounds": (5, "alternating rounds"),
    "requests": (32, "requests a round and policy"),
    "concurrency": (16, "requests at a time"),
    "input_tokens": (8, "tokens a prompt"),
    "output_tokens": (32, "tokens a continuation"),
}


class Parser(argparse.ArgumentParser):
    """The parser of `python -m <module>`. A wrong command line ends with one line and exit code 1."""

    def __init__(self, module: str, description: str | None) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=f"python -m {module}", description=description, formatter_class=formatter)

    def error(self, message: str) -> NoReturn:
        """End the program with one line."""
        sys.exit(f"{self.prog}: {message}")

    def add_policies(self, kind: Callable[[str], object], default: Sequence[str], text: str) -> None:
        """Add a list of policies, each of this kind."""
        self.add_argument(
            "policies", nargs="*", type=kind, default=default, help=f"{text} (default: {' '.join(default)})"
        )

    def add_counts(self, counts: Mapping[str, tuple[int, str]] = COUNTS, /, *names: str, **defaults: int) -> None:
        """Add flags of the named `counts`, or of all, with these defaults or the usual ones."""
        for name in names or counts:
            usual, text = counts[name]
            self.add_count(name, defaults.get(name, usual), text)

    def add_count(self, name: str, default: int, text: str) -> None:
        """Add a flag that takes a whole number above 0."""
        flag = "--" + name.replace("_", "-")
        self.add_argument(flag, type=positive, default=default, metavar="N", help=f"{text} (default: {default})")

    def add_numbers(
        self, name: str, default: Sequence[float], text: str, kind: Callable[[str], float] | None = None
    ) -> None:
        """Add a flag that takes one number or several, each of this kind, by default whole and above 0."""
        flag, help = "--" + name.replace("_", "-"), f"{text} (default: {' '.join(map(str, default))})"
        self.add_argument(flag, nargs="+", type=kind or positive, default=default, metavar="N", help=help)

    def add_checkpoint(self, model: Path, texts: Path | None = None) -> None:
        """Add flags of the folder of a checkpoint and of its texts, a domain a `*.txt`; by default the model's own."""
        own = "the model's heldout/" if texts is None else "the trained model's"
        self.add_argument("--model", type=folder, default=model, help="checkpoint folder (default: %(default)s)")
        self.add_argument(
            "--texts", type=folder, default=texts, help=f"folder of *.txt, a domain each (default: {own})"
        )

    def add_record(self, out: Path) -> None:
        """Add flags of the record, which `open_record` reads."""
        self.add_argument("--out", type=Path, default=out, help="folder of the record (default: %(default)s)")
        self.add_argument("--resume", action="store_true", help="continue the record in that folder")

    def open_record(self, experiment: str, args: argparse.Namespace, argv: Sequence[str] | None = None) -> Record:
        """Return the record of a run with these arguments, without those of `add_record`."""
        asked = {name: value for name, value in vars(args).items() if name not in ("out", "resume")}
        command = [*self.prog.split(), *(sys.argv[1:] if argv is None else argv)]
        return Record(args.out, experiment, command, asked, args.resume)


def positive(text: str) -> int:
    """Return a whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0 (got {text!r})")
    return int(text)


def folder(text: str) -> Path:
    """Return an existing folder."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"must be an existing folder (got {text})")
    return path.resolve()


def policy(text: str) -> str:
    """Return a policy that is spelt correctly."""
    try:
        return parse_variant(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def selecting(text: str) -> str:
    """Return a policy that is spelt correctly and selects."""
    if parse_variant(policy(text)).policy in (None, BASELINE, "observe"):
        raise argparse.ArgumentTypeError(f"policy must select (got {text!r})")
    return text


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """End a program that fails or is stopped, also by SIGTERM, with one line and a status other than 0."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    except KeyboardInterrupt:
        print(f"{program}: interrupted; every server is stopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except (RuntimeError, ValueError, OSError) as error:
        sys.exit(f"{program}: {error}")


def run_main(program: str, main: Callable[[], object]) -> None:
    """Run a program and print its errors as one line."""
    with one_line_errors(program):
        main()
