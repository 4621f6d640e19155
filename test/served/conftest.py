"""Servers that several tests ask the same."""

import os
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from filelock import FileLock

from served import host
from served.answers import SERVERS, SIZES, Answers, ask
from served.ranks import Answers as RankedAnswers
from served.ranks import serve
from served.release import LATEST


@pytest.fixture(scope="session")
def served(
    tiny_model: Path,
    patched_release: Callable[[str], Path],
    pristine_release: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Callable[..., Answers]:
    """Call it with a name of SERVERS, or "unpatched", for its answers. Each server runs once and alone, whichever of
    pytest's workers requests it first. The parts of `make test-long` share the answers in the folder $SERVED.
    """
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent  # of this run's workers
    folder = Path(os.environ.get("SERVED", folder))

    @cache
    def run(name: str, release: str) -> Answers:
        kept = folder / f"served-{name}-{release}.pickle"
        with FileLock(f"{kept}.lock"):
            if kept.exists():
                return pickle.loads(kept.read_bytes())
            tree = pristine_release(release) if name == "unpatched" else patched_release(release)
            flags = () if name == "unpatched" else SERVERS[name]
            sizes = SIZES.get(name, (16, 16, 1))
            answers = ask(tiny_model, tree, flags, tmp_path_factory.mktemp("served"), sizes)
            written = kept.with_suffix(".part")  # a worker that is stopped leaves no half of it
            written.write_bytes(pickle.dumps(answers))
            written.replace(kept)
            return answers

    return lambda name, release=LATEST: run(name, release)


@pytest.fixture(scope="session")
def asked(
    tiny_model: Path, patched_release: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Answers]:
    """Call it with flags for the answers of a server, as `answers.ask` returns them. Tests of one file share a server
    if all arguments are equal; `hosted` installs the plugin of `host.py`.
    """

    @cache
    def run(
        flags: tuple[str, ...],
        release: str,
        sizes: tuple[int, ...],
        staggered: bool,
        env: tuple[tuple[str, str], ...],
        hosted: bool,
    ) -> Answers:
        scratch = tmp_path_factory.mktemp("asked")
        if hosted:
            host.install(scratch)
        return ask(tiny_model, patched_release(release), flags, scratch, sizes, dict(env), staggered)

    def request(
        *flags: str,
        release: str = LATEST,
        sizes: tuple[int, ...] = (16, 16, 1),
        staggered: bool = False,
        env: dict[str, str] | None = None,
        hosted: bool = False,
    ) -> Answers:
        sizes = sizes[:1] if staggered else sizes
        return run(flags, release, sizes, staggered, tuple((env or {}).items()), hosted)

    return request


@pytest.fixture(scope="session")
def ranked(
    tiny_model: Path,
    patched_release: Callable[[str], Path],
    pristine_release: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., RankedAnswers]:
    """Call it with flags for what a server of several ranks does, of a release's patched tree unless told otherwise."""

    @cache
    def run(flags: tuple[str, ...], release: str, patched: bool) -> RankedAnswers:
        tree = (patched_release if patched else pristine_release)(release)
        return serve(tiny_model, tree, flags, tmp_path_factory.mktemp("ranked"))

    return lambda *flags, release=LATEST, patched=True: run(flags, release, patched)
