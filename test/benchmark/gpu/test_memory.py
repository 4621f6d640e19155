"""Servers that do not fit are refused in one line, before any is started."""

import pytest

from benchmark.gpu import memory, serving
from benchmark.gpu.memory import GIB, OVERHEAD, check_memory, estimate_bytes, read_free_bytes
from benchmark.gpu.server import OFF_AND_ON

H200 = 139 * GIB


def test_estimates_are_those_of_the_published_checkpoints():
    weights = {
        name: (estimate_bytes(name) - OVERHEAD) / 1e9 for name in ("qwen3-30b-a3b", "gpt-oss-120b", "gpt-oss-20b")
    }
    # 30.5 billion parameters in bf16; 65 and 14 GB of mxfp4 on the hub
    assert weights == pytest.approx({"qwen3-30b-a3b": 61.1, "gpt-oss-120b": 65.2, "gpt-oss-20b": 13.8}, rel=0.02)


def test_two_of_the_largest_fit_and_three_do_not(monkeypatch):
    monkeypatch.setattr(memory, "read_free_bytes", lambda: H200)
    check_memory(["gpt-oss-120b"] * 2)
    check_memory(["qwen3-30b-a3b"] * 2)
    check_memory(["qwen3-30b-a3b-12-layers"] * 5)
    with pytest.raises(RuntimeError, match=r"^gpt-oss-120b: 3 servers need about 194 GiB of GPU memory; free are 139$"):
        check_memory(["gpt-oss-120b"] * 3)


def test_no_server_is_started_where_they_do_not_fit(monkeypatch):
    monkeypatch.setattr(memory, "read_free_bytes", lambda: 80 * GIB)
    monkeypatch.setattr(serving, "serve", lambda *_: pytest.fail("started"))
    with (
        pytest.raises(RuntimeError, match="2 servers need about"),
        serving.serve_dummies("qwen3-30b-a3b", OFF_AND_ON),
    ):
        pass


@pytest.mark.parametrize("printed", ["echo 142000", "echo '[N/A]'", "exit 9"])
def test_the_driver_is_asked(tmp_path, monkeypatch, printed):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{printed}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if printed == "echo 142000":
        assert read_free_bytes() == 142000 << 20
    else:
        with pytest.raises(RuntimeError, match="nvidia-smi does not say"):
            read_free_bytes()
