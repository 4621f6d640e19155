"""Servers that do not fit are refused in one line, before any is started."""

from types import SimpleNamespace

import pytest

from benchmark.gpu import eagle3, memory, serving
from benchmark.gpu.memory import CONTEXT, GIB, check_memory, count_weight_bytes, estimate_bytes, read_free_bytes
from benchmark.gpu.models import CONFIGS
from benchmark.gpu.server import CASES, OFF_AND_ON
from programs import write_program

H200 = 139 * GIB


def test_estimates_are_those_of_the_published_checkpoints():
    names = ("qwen3-30b-a3b", "gpt-oss-120b", "gpt-oss-20b")
    weights = {name: count_weight_bytes(CONFIGS[name]) / 1e9 for name in names}
    # 30.5 billion parameters in bf16. 65.2 and 13.8 GB of mxfp4 on the hub; beside them in 0.5.17, an expert:
    # (5760 + 2880) x 32 bytes of padding (1440 -> 1472 a row) and (5888 + 3072) x 90 of scales in a second layout.
    more = (8640 * 32 + 8960 * 90) / 1e9
    expected = {"gpt-oss-120b": 65.2 + 36 * 128 * more, "gpt-oss-20b": 13.8 + 24 * 32 * more}
    assert weights == pytest.approx({"qwen3-30b-a3b": 61.1} | expected, rel=0.01)


def test_what_loading_takes_beside_the_weights_counts():
    """A layer's 128 x 5760 rows of 1440 bytes, 10.2 times; gpt-oss-20b's 32 experts take less than serving does."""
    loading = estimate_bytes("gpt-oss-120b") - count_weight_bytes(CONFIGS["gpt-oss-120b"]) - CONTEXT
    assert loading == pytest.approx(10.2 * 128 * 5760 * 1440, abs=1)
    assert estimate_bytes("gpt-oss-20b") == pytest.approx(count_weight_bytes(CONFIGS["gpt-oss-20b"]) + 4 * GIB, abs=1)


def test_a_draft_counts():
    draft = count_weight_bytes(CONFIGS[eagle3.DRAFT])
    assert 1e9 < draft < 3e9
    assert estimate_bytes("gpt-oss-20b", eagle3.DRAFT) - estimate_bytes("gpt-oss-20b") == pytest.approx(draft, abs=1)


def test_two_of_the_largest_fit_and_three_do_not(monkeypatch):
    monkeypatch.setattr(memory, "read_free_bytes", lambda: H200)
    check_memory(["gpt-oss-120b-30-layers"] * 2)
    check_memory([eagle3.MODEL] * 2, eagle3.DRAFT)
    check_memory(["qwen3-30b-a3b"] * 2)
    check_memory(["qwen3-30b-a3b-12-layers"] * 5)
    with pytest.raises(RuntimeError, match=r"gpt-oss-120b: 2 servers need about 153 GiB.* 139"):
        check_memory(["gpt-oss-120b"] * 2)
    for case in CASES.values():
        check_memory([case.model] * 2)


def test_servers_of_unequal_caches_are_not_compared():
    def server(name, tokens):
        return SimpleNamespace(name=name, get=lambda path: {"max_total_num_tokens": tokens})

    serving.check_caches([server("off", 16384), server("on", 16384)])
    with pytest.raises(RuntimeError, match="caches: off 16384, on 9216"):
        serving.check_caches([server("off", 16384), server("on", 9216)])


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
    write_program(tmp_path / "nvidia-smi", printed)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if printed == "echo 142000":
        assert read_free_bytes() == 142000 << 20
    else:
        with pytest.raises(RuntimeError, match="nvidia-smi does not say"):
            read_free_bytes()
