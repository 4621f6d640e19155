"""Fixtures of the tests of the run on a GPU."""

from stage.conftest import attach

__all__ = ["attach"]
