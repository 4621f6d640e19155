"""Fixtures of the patch engine's tests."""

import pytest

from patching.fake import write_queue, write_tree


@pytest.fixture
def tree(tmp_path):
    """A pristine fake release."""
    return write_tree(tmp_path / "site-packages")


@pytest.fixture
def queue(tmp_path):
    """The queue for it."""
    return write_queue(tmp_path / "patches")
