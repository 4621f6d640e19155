"""The comparison of an SGLang version with a release."""

from packaging.version import Version


def is_since(running: str, release: str) -> bool:
    """Return whether SGLang `running` has the code of `release`. Raises ValueError if a text is not a version."""
    # `Version` orders candidates and source builds before their release. But candidate 0.5.24rc1 has all of the code of
    # 0.5.24. Source build 0.5.24.dev3+gabc is three commits after 0.5.23, and its files are closer to those of 0.5.24.
    return Version(Version(running).base_version) >= Version(release)
