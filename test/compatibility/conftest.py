"""Fixtures of the tests of what runs once."""

import pytest


@pytest.fixture
def read(monkeypatch):
    """Call it with a model's routers and flags for the layers the stage finds: `loaded.find`, on one rank."""
    from compatibility.loaded import find

    monkeypatch.setattr("sglang_xshare.compatibility.layers.read_placement", lambda model_runner: None)
    return find
