"""Fixtures of the live control's tests: the stage's fake model, and the stage around it."""

from stage.conftest import attach

__all__ = ["attach"]
