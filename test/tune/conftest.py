"""Fixtures of the tests of `tune`: texts, and a server in place of those that its commands ask."""

import pytest

from tune.fake import FakeServer


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        text = bytes((place * 7 + number) % 251 for place in range(4000)).decode(errors="replace")
        (folder / f"{number}.txt").write_bytes(text.encode())
    return folder


@pytest.fixture
def server(monkeypatch):
    fake = FakeServer()
    for name in ("server.Server", "command.Client"):
        monkeypatch.setattr(f"sglang_xshare.tune.{name}", lambda url, *keys: fake)
    return fake
