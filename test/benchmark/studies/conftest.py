"""Fixtures of the studies' tests: the small random checkpoint of those of quality."""

from quality.conftest import checkpoint, model

__all__ = ["checkpoint", "model"]
