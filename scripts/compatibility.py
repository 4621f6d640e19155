"""Write the table in docs/patching.md with the requirements of each supported SGLang release.

python -m scripts.compatibility           write the table
python -m scripts.compatibility --check   check that the table is up to date
"""

import argparse
import importlib.metadata
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.fetch_release import fetch_release
from sglang_xshare.patching.queue import find_root, list_releases

PAGE = Path(__file__).resolve().parents[1] / "docs/patching.md"
BEGIN, END = "<!-- made by python -m scripts.compatibility -->\n", "<!-- end -->\n"


@dataclass(frozen=True)
class Needs:
    """The requirements in the metadata of a release's wheel, without `==`."""

    torch: str
    cuda: str
    python: str
    kernels: str

    def __str__(self) -> str:
        return f"torch {self.torch}, CUDA {self.cuda}, Python {self.python}, sglang-kernel {self.kernels}"


def read_needs(tree: Path) -> Needs:
    """Read the requirements from an unpacked wheel. Raises ValueError if its metadata does not contain all of them."""
    (wheel,) = importlib.metadata.distributions(name="sglang", path=[str(tree)])
    pins: dict[str, str] = {}
    for requirement in wheel.requires or ():
        if match := re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*([<>=!~]=?[^;\s]+)?\s*$", requirement):
            pins.setdefault(match[1].lower().replace("_", "-"), (match[2] or "").removeprefix("=="))
    found = (pins.get("torch"), pins.get("cuda-python"), wheel.metadata["Requires-Python"], pins.get("sglang-kernel"))
    torch, cuda, python, kernels = found
    if not (torch and cuda and python and kernels):
        raise ValueError(f"{tree}: must require torch, cuda-python, Python and sglang-kernel (got {found})")
    return Needs(torch, cuda, python, kernels)


def make_table(releases: list[str]) -> str:
    """Return a Markdown table with one row for each release, newest first. Missing releases are downloaded."""
    rows = ["| SGLang | torch | CUDA | Python | sglang-kernel |", "| --- | --- | --- | --- | --- |"]
    for release in reversed(releases):
        needs = read_needs(fetch_release(release))
        rows.append(f"| {release} | {needs.torch} | {needs.cuda} | {needs.python} | {needs.kernels} |")
    return "\n".join(rows) + "\n"


def replace_table(page: str, table: str, begin: str = BEGIN) -> str:
    """Replace the table between the two marks of a page, and return the page."""
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(END)
    return f"{before}{begin}{table}{END}{after}"


def write_page(page: Path, make: Callable[[], str], command: str, description: str | None) -> None:
    """Write the page that `make` returns. With `--check`, exit with an error if the page differs instead.

    `command` is the command that calls this function.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check, wanted = parser.parse_args().check, make()
    if not check:
        page.write_text(wanted)
    elif not page.exists() or page.read_text() != wanted:
        sys.exit(f"{command.rpartition('.')[2]}: docs/{page.name} is not up to date: {command}")


if __name__ == "__main__":

    def make_page() -> str:
        return replace_table(PAGE.read_text(), make_table(list_releases(find_root())))

    write_page(PAGE, make_page, "python -m scripts.compatibility", __doc__)
