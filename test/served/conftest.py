"""Servers that several tests ask the same."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from served.answers import SERVERS, SIZES, Answers, ask
from served.release import LATEST


@pytest.fixture(scope="session")
def served(
    tiny_model: Path,
    patched_release: Callable[[str], Path],
    pristine_release: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Answers]:
    """Call it with a name of SERVERS, or "unpatched", for its answers: every server runs once, and alone."""

    @cache
    def run(name: str, release: str) -> Answers:
        tree = pristine_release(release) if name == "unpatched" else patched_release(release)
        flags = () if name == "unpatched" else SERVERS[name]
        return ask(tiny_model, tree, flags, tmp_path_factory.mktemp("served"), SIZES.get(name, (16, 16, 1)))

    return lambda name, release=LATEST: run(name, release)
