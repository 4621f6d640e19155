"""Release numbers of SGLang: whether a build has a release's code, and which release comes first."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.version import InvalidVersion, Version


def is_since(running: str, release: str) -> bool:
    """Whether SGLang `running` has the code of `release`: it is that one, a build on the way to it, or a later one.

    Raises `packaging.version.InvalidVersion`, a ValueError, for text that is no version.
    """
    # `Version` orders what leads to a release before it, but that has its code, or nearly: candidate 0.5.24rc1 all of
    # it, source build 0.5.24.dev3+gabc what was merged up to three commits after 0.5.23. We read each release's code in
    # its files, and such a build's are those of the release to come rather than of the one before.
    return Version(Version(running).base_version) >= Version(release)


def sort_releases(names: Iterable[str]) -> list[str]:
    """Releases from the oldest to the newest, 0.5.9 before 0.5.17; at the end, by name, what is no version."""
    return sorted(names, key=_order)


def _order(name: str) -> tuple[bool, Version, str]:
    try:
        return False, Version(name), name
    except InvalidVersion:
        return True, Version("0"), name
