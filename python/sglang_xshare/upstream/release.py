"""The comparison of a build of SGLang with a release."""

from packaging.version import Version


def is_since(running: str, release: str) -> bool:
    """Return whether SGLang `running` has the code of `release`. Raises ValueError for text that is no version."""
    # `Version` orders a release's builds below it. But candidate 0.5.24rc1 has all of the code of 0.5.24, and source
    # build 0.5.24.dev3+gabc, three commits after 0.5.23, has files that are closer to 0.5.24's than to 0.5.23's.
    return Version(Version(running).base_version) >= Version(release)
