"""Run SGLang's own CPU unit tests on the published and on the patched release, and compare the results.

    git clone --depth 1 --branch v0.5.23 https://github.com/sgl-project/sglang ../sglang
    .venv/bin/python -m scripts.upstream_tests ../sglang

The release is the installed one. Both runs use the packages of this environment. Tests that need a GPU or a missing
package fail in both runs and are only counted. If a test passes only on the published package, its file runs again on
both packages, without other files. If the test again passes only on the published package, it is reported, and the exit
code is 1.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from scripts.fetch_release import fetch_release, tell_download
from sglang_xshare.patching import PatchError, apply
from sglang_xshare.patching.queue import find_root
from sglang_xshare.patching.tree import find_tree

UNIT = "test/registered/unit"
PARTS = ("layers/moe", "managers", "model_executor", "speculative", "server_args")
OUTCOMES = ("skipped", "passed", "failed")
PYTEST = ["-m", "pytest", "-q", "--no-header", "--no-summary", "--tb=no", "--disable-warnings", "--timeout=120"]
PYTEST += ["-p", "no:cacheprovider", "--import-mode=importlib", "--continue-on-collection-errors"]
PYTEST += ["-o", "junit_family=xunit1", "-p", "no:hypothesispytest", "--dist=loadfile", "-n2"]

Results = dict[tuple[str, str], str]
"""The outcome of each test. A key contains the test's file, relative to `UNIT`, and its name."""


@dataclass(frozen=True)
class Comparison:
    """The outcomes of SGLang's tests on the published package and on the patched package."""

    published: Results
    patched: Results
    broken: list[tuple[str, str]]

    def describe(self) -> Iterator[str]:
        """Yield one line for each part, and one for each test that passes only on the published package."""
        yield f"{'':16}{'published':>27}{'patched':>27}"
        yield f"{'':16}" + "".join(f"{name:>9}" for name in OUTCOMES) * 2
        for part in PARTS:
            counts = [_count(results, part) for results in (self.published, self.patched)]
            yield f"{part:16}" + "".join(f"{count[name]:>9}" for count in counts for name in OUTCOMES)
        yield from (f"passes on the published package alone: {file}::{name}" for file, name in self.broken)


def check_release(checkout: Path, release: str) -> None:
    """Check that the checkout contains the tests and is at the commit of the release. Raises ValueError if not."""
    git = ["git", "-C", str(checkout), "tag", "--points-at", "HEAD"]
    tags = subprocess.run(git, capture_output=True, text=True).stdout.split()
    if f"v{release}" not in tags:
        found = ", ".join(tags) or "no release"
        raise ValueError(f"CHECKOUT {checkout}: the commit must be v{release}, the installed release (got {found})")
    if not any((checkout / UNIT / part).is_dir() for part in PARTS):
        raise ValueError(f"CHECKOUT {checkout}: must be a clone of upstream's repository (got no tests in {UNIT})")


def run_tests(tree: Path, checkout: Path, paths: Collection[str], scratch: Path) -> Results:
    """Run some test files or folders with the SGLang package in `tree`.

    `paths` are relative to `UNIT`. Raises ValueError if pytest writes no report.
    """
    report = scratch / "report.xml"
    report.unlink(missing_ok=True)
    env = os.environ | {"PYTHONPATH": str(tree)}
    command = [sys.executable, *PYTEST, f"--junitxml={report}", f"--rootdir={checkout / UNIT}", *paths]
    code = subprocess.run(command, cwd=checkout / UNIT, env=env).returncode
    if not report.is_file():
        raise ValueError(f"pytest must write a report (got status {code} and none): {' '.join(command)}")
    results: Results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        # If a file cannot be imported, its test case has no class, and the name of the case is the module's name.
        module = case.get("file") or case.get("name", "").replace(".", "/") + ".py"
        group = case.get("classname", "").removeprefix(module.removesuffix(".py").replace("/", ".")).strip(".")
        test = (module, f"{group}::{case.get('name')}".removeprefix("::"))
        found = {"skipped": "skipped", "failure": "failed", "error": "failed"}
        outcomes = [found[child.tag] for child in case if child.tag in found] or ["passed"]
        results[test] = max([*outcomes, results.get(test, "skipped")], key=OUTCOMES.index)
    return results


def compare(checkout: Path, published: Path, patched: Path, scratch: Path) -> Comparison:
    """Run all parts with both packages. Raises ValueError if no test passes on the published package."""

    def run(what: str, *paths: str) -> tuple[Results, Results]:
        print(f"upstream_tests: {what}, published", flush=True)
        first = run_tests(published, checkout, paths, scratch)
        print(f"upstream_tests: {what}, patched", flush=True)
        return first, run_tests(patched, checkout, paths, scratch)

    both = run("all", *(part for part in PARTS if (checkout / UNIT / part).is_dir()))
    if "passed" not in both[0].values():
        raise ValueError("a test must pass on the published package (got none)")
    broken: list[tuple[str, str]] = []
    # Each file runs again without other files. Tests of different files can share a process and its state, and which
    # files share a process differs from run to run.
    for file in sorted({file for file, _ in _list_broken(*both)}):
        broken += _list_broken(*run(f"again {file}", file))
    return Comparison(*both, broken)


def _list_broken(published: Results, patched: Results) -> list[tuple[str, str]]:
    return [test for test, said in published.items() if said == "passed" and patched.get(test) != "passed"]


def _count(results: Results, part: str) -> Counter[str]:
    return Counter(said for (file, _), said in results.items() if file.startswith(f"{part}/"))


@contextmanager
def copy_patched(tree: Path, root: Path) -> Iterator[Path]:
    """Create a patched copy of a package.

    The copy consists of hard links. This is safe, because the patch tool replaces files instead of changing them.
    """
    with tempfile.TemporaryDirectory(dir=tree.parent, prefix=".patched-") as scratch:
        copy = Path(scratch) / "tree"
        shutil.copytree(tree, copy, copy_function=os.link)
        apply(copy, root)
        yield copy


def main() -> bool:
    """Run the comparison and print it. Return whether no test passes only on the published package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a clone of upstream's repository, at the installed release's tag")
    checkout = parser.parse_args().checkout.resolve()
    release = find_tree().release
    check_release(checkout, release)
    published = fetch_release(release)
    with copy_patched(published, find_root()) as patched, tempfile.TemporaryDirectory() as scratch:
        found = compare(checkout, published, patched, Path(scratch))
    print(*found.describe(), sep="\n")
    print(f"upstream_tests: {release}: {len(found.broken)} pass on the published package alone")
    return not found.broken


if __name__ == "__main__":
    try:
        sys.exit(not main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"upstream_tests: {tell_download(find_tree().release, error)}")
    except (PatchError, ValueError) as error:
        sys.exit(f"upstream_tests: {error}")
