"""Common parts of the benchmarks' command lines: flags, argument types and one-line errors."""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from benchmark.common.record import Record
from benchmark.common.variant import BASELINE, parse_variant

# The flags that describe a workload. Each flag has a default value and a help text.
COUNTS = {
    "rounds": (5, "alternating rounds"),
    "requests": (32, "requests a round and policy"),
    "concurrency": (16, "requests at a time"),
    "input_tokens": (8, "tokens a prompt"),
    "output_tokens": (32, "tokens a continuation"),
}


class Parser(argparse.ArgumentParser):
    """An argument parser for `python -m <module>`. A wrong command line prints one line and exits with code 1."""

    def __init__(self, module: str, description: str | None) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=f"python -m {module}", description=description, formatter_class=formatter)

    def error(self, message: str) -> NoReturn:
        """Print the error as one line and exit with code 1."""
        sys.exit(f"{self.prog}: {message}")

    def add_policies(self, kind: Callable[[str], object], default: Sequence[str], text: str) -> None:
        """Add an argument that takes a list of policies. The function `kind` converts each policy."""
        self.add_argument(
            "policies", nargs="*", type=kind, default=default, help=f"{text} (default: {' '.join(default)})"
        )

    def add_counts(self, counts: Mapping[str, tuple[int, str]] = COUNTS, /, *names: str, **defaults: int) -> None:
        """Add one flag for each name in `names`, or for every count if no name is given.

        `counts` contains the default and the help text of each flag. `defaults` replaces some of these defaults.
        """
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
        """Add a flag that takes one or more numbers.

        The function `kind` converts each number. By default each number must be a whole number above 0.
        """
        flag, help = "--" + name.replace("_", "-"), f"{text} (default: {' '.join(map(str, default))})"
        self.add_argument(flag, nargs="+", type=kind or positive, default=default, metavar="N", help=help)

    def add_checkpoint(self, model: Path, texts: Path | None = None) -> None:
        """Add flags for the checkpoint folder and for the text folder. Each `*.txt` file there is one domain."""
        own = "the model's heldout/" if texts is None else "the trained model's"
        self.add_argument("--model", type=folder, default=model, help="checkpoint folder (default: %(default)s)")
        self.add_argument(
            "--texts", type=folder, default=texts, help=f"folder of *.txt, a domain each (default: {own})"
        )

    def add_record(self, out: Path) -> None:
        """Add the flags `--out` and `--resume`, which `open_record` reads."""
        self.add_argument("--out", type=Path, default=out, help="folder of the record (default: %(default)s)")
        self.add_argument("--resume", action="store_true", help="continue the record in that folder")

    def open_record(self, experiment: str, args: argparse.Namespace, argv: Sequence[str] | None = None) -> Record:
        """Return the record of this run. The record stores all arguments except `--out` and `--resume`."""
        asked = {name: value for name, value in vars(args).items() if name not in ("out", "resume")}
        command = [*self.prog.split(), *(sys.argv[1:] if argv is None else argv)]
        return Record(args.out, experiment, command, asked, args.resume)


def positive(text: str) -> int:
    """Parse a whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0 (got {text!r})")
    return int(text)


def folder(text: str) -> Path:
    """Parse the path of an existing folder, and return the absolute path."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"must be an existing folder (got {text})")
    return path.resolve()


def policy(text: str) -> str:
    """Check the spelling of a policy, and return the policy."""
    try:
        return parse_variant(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def selecting(text: str) -> str:
    """Check that a policy is spelt correctly and selects experts, and return the policy."""
    if parse_variant(policy(text)).policy in (None, BASELINE, "observe"):
        raise argparse.ArgumentTypeError(f"policy must select (got {text!r})")
    return text


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Print one line and exit with a nonzero status if the program fails or is interrupted.

    SIGTERM exits with status 143 and prints no line.
    """
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
