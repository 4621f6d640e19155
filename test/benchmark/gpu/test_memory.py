"""Servers that do not fit are refused in one line, before any is started."""

import pytest

from benchmark.common.record import Record
from benchmark.gpu import eagle3, memory
from benchmark.gpu.memory import GIB, choose_model, estimate_bytes
from programs import write_program


def test_what_a_server_takes_is_its_weights_and_what_loading_or_serving_takes():
    """30.5 billion parameters in bf16; 65.2 and 13.8 GB of mxfp4 on the hub, and beside them in 0.5.17, an expert:
    (5760 + 2880) x 32 bytes of padding (1440 -> 1472 a row) and (5888 + 3072) x 90 of scales in a second layout. A
    layer that is loaded has 128 x 5760 rows of 1440 bytes, 10.2 times; gpt-oss-20b's takes less than serving does.
    """
    more, loading = 8640 * 32 + 8960 * 90, GIB + 10.2 * 128 * 5760 * 1440
    expected = {
        "qwen3-30b-a3b": 61.1e9 + 4 * GIB,
        "gpt-oss-120b": 65.2e9 + 36 * 128 * more + loading,
        "gpt-oss-20b": 13.8e9 + 24 * 32 * more + 4 * GIB,
    }
    assert {name: estimate_bytes(name) for name in expected} == pytest.approx(expected, rel=0.02)
    assert 1 * GIB < estimate_bytes("gpt-oss-20b", eagle3.DRAFT) - estimate_bytes("gpt-oss-20b") < 3 * GIB


@pytest.mark.parametrize(
    ("gib", "qwen", "oss", "small"),
    [
        (139, "qwen3-30b-a3b", "gpt-oss-120b", "gpt-oss-20b"),
        (78, "qwen3-30b-a3b", "gpt-oss-120b", "gpt-oss-20b"),
        (40, "qwen3-30b-a3b-24-layers", "gpt-oss-120b-12-layers", "gpt-oss-20b"),
        (11, "qwen3-30b-a3b-4-layers", None, "gpt-oss-20b-4-layers"),
        (5, None, None, None),
    ],
)
def test_the_layers_are_those_that_fit(gib, qwen, oss, small):
    assert choose_model("qwen3-30b-a3b", 1, gib * GIB) == qwen
    assert choose_model("gpt-oss-120b", 1, gib * GIB) == oss
    assert choose_model("gpt-oss-20b", 1, gib * GIB) == small


def test_what_is_cut_or_left_out_is_said_until_it_fits(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SGLANG_XSHARE_DEVICE", "cpu")  # what stands for a driver below is no GPU
    record = Record(tmp_path, "server", ["made up"])
    for gib, said in (
        (78, "24 of 48: 2 servers of 48 need about 122 GiB of GPU memory; 78 are free"),
        (11, "none, because 4 do not fit either: 2 servers of 48 need about 122 GiB of GPU memory; 11 are free"),
    ):
        write_program(tmp_path / "bin" / "nvidia-smi", f"echo {gib * 1024}")
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
        memory.fit_model(record, "qwen3", "qwen3-30b-a3b", 2)
        assert capsys.readouterr().out == f"gpu: qwen3: {said}\n"
        assert [row.measured for row in memory.rows(record.points, "qwen3")] == [said]
    write_program(tmp_path / "bin" / "nvidia-smi", "echo 142000")
    assert memory.fit_model(record, "qwen3", "qwen3-30b-a3b", 2) == "qwen3-30b-a3b"
    assert list(memory.rows(record.points, "qwen3")) == []
