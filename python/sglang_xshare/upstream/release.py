"""Whether a build of SGLang has a release's code."""

from packaging.version import Version


def is_since(running: str, release: str) -> bool:
    """Whether SGLang `running` has the code of `release`: that one, a build on the way to it, or a later one. Raises
    `packaging.version.InvalidVersion`, a ValueError, for text that is no version.
    """
    # `Version` orders what leads to a release before it, but that has its code, or nearly: candidate 0.5.24rc1 all of
    # it, source build 0.5.24.dev3+gabc what was merged up to three commits after 0.5.23. We read each release's code in
    # its files, and such a build's are those of the release to come rather than of the one before.
    return Version(Version(running).base_version) >= Version(release)
