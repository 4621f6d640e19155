"""As many layers are served as the GPU's free memory takes, and the table says of which there are fewer."""

from pathlib import Path

import pytest
from gpu.recorded import served, write_record

from benchmark.gpu import depth, eagle3, replay, server, serving
from benchmark.gpu.depth import choose_model, fits
from benchmark.gpu.memory import GIB, estimate_bytes
from benchmark.gpu.models import CONFIGS, name_cut, read_config
from benchmark.gpu.table import list_rows

OSS = "gpt-oss-120b-30-layers"


@pytest.mark.parametrize(
    ("gib", "qwen", "oss", "small"),
    [
        (139, "qwen3-30b-a3b", OSS, "gpt-oss-20b"),
        (79, "qwen3-30b-a3b-24-layers", "gpt-oss-120b-12-layers", "gpt-oss-20b"),
        (78, "qwen3-30b-a3b-24-layers", "gpt-oss-120b-12-layers", "gpt-oss-20b"),
        (21, None, None, "gpt-oss-20b-4-layers"),
        (11, None, None, None),
    ],
)
def test_the_layers_are_those_that_fit(gib, qwen, oss, small):
    assert choose_model("qwen3-30b-a3b", 2, gib * GIB) == qwen
    assert choose_model(OSS, 2, gib * GIB) == oss
    assert choose_model(eagle3.MODEL, 2, gib * GIB, eagle3.DRAFT) == oss
    assert choose_model("gpt-oss-20b", 2, gib * GIB) == small


def test_no_more_layers_would_fit():
    free = 78 * GIB
    for name in ("qwen3-30b-a3b", OSS):
        layers = read_config(choose_model(name, 2, free))["num_hidden_layers"]
        assert 2 * estimate_bytes(name_cut(name, layers)) <= 0.9 * free < 2 * estimate_bytes(name_cut(name, layers + 4))


def test_five_servers_of_a_replay_fit_an_h200_and_three_and_two_an_h100():
    assert fits(replay.MODEL, 5, 139 * GIB)
    assert [fits(replay.MODEL, count, 78 * GIB) for count in (5, 3, 2)] == [False, True, True]


def test_a_cut_model_differs_by_its_layers_alone():
    for name in ("qwen3-30b-a3b", OSS):
        whole, cut = read_config(name), read_config(name_cut(name, 8))
        assert {key for key in whole if whole[key] != cut[key]} <= {"num_hidden_layers", "layer_types"}
        assert cut["num_hidden_layers"] == 8
        assert "layer_types" not in cut or cut["layer_types"] == ["sliding_attention", "full_attention"] * 4
    assert read_config(name_cut("qwen3-30b-a3b", 12)) == CONFIGS["qwen3-30b-a3b-12-layers"]


def texts(results):
    """What the table says, row by row."""
    return [f"{row.what}: {row.measured}" for _, row in list_rows(results)]


def test_a_pair_is_cut_and_the_table_says_so(tmp_path, gpu, capsys):
    gpu.gib = 78
    record = write_record(tmp_path, "server", {})
    server.measure(record, ["qwen3-30b-a3b"])
    assert gpu.served == [("qwen3-30b-a3b-24-layers", 2)]
    said = "24 of 48: 2 servers of 48 need about 122 GiB of GPU memory; free are 78"
    assert capsys.readouterr().out == f"gpu: qwen3-30b-a3b: {said}\n"
    first, *others = texts(tmp_path)
    assert first == f"qwen3-30b-a3b, layers: {said}"
    assert len(others) == 5
    assert all(text.startswith("qwen3-30b-a3b-24-layers, xshare") for text in others)
    assert record.points["qwen3-30b-a3b/layers"]["layers"] == 24


def test_what_does_not_fit_at_all_is_left_out_in_one_line(tmp_path, gpu, capsys):
    gpu.gib = 11
    record = write_record(tmp_path, "server", {})
    server.measure(record, ["qwen3-30b-a3b", "gpt-oss-20b"])
    eagle3.measure(write_record(tmp_path, "eagle3", {}), [])
    assert gpu.served == []
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "gpu: qwen3-30b-a3b: left out, with 4 layers too: 2 servers of 48 need about 122 GiB of GPU memory; free are 11"
    )
    assert len(lines) == 3
    assert sum("left out" in text for text in texts(tmp_path)) == 3


def test_a_replay_is_served_in_turn(tmp_path, gpu, monkeypatch):
    counted = {"rows": 5292.0, "experts_before": 40.0, "experts_after": 30.0, "layer_steps": 756.0}
    monkeypatch.setattr(replay, "_count", lambda server: counted)
    gpu.gib = 78
    record = write_record(tmp_path, "replay", {})
    replay.measure(record, ["server"])
    assert gpu.served == [(replay.MODEL, 3), (replay.MODEL, 2)]
    assert "servers of qwen3-30b-a3b-12-layers: 3, then 2: too many for the GPU's memory at once" in texts(tmp_path)
    replay.measure(record, ["server"])
    assert len(gpu.served) == 2


def test_rounds_of_other_layers_are_not_continued(tmp_path, monkeypatch):
    point = served(100.0, 110.0)
    record = write_record(tmp_path, "server", {"a": point | {"workload": point["workload"] | {"model": "x-24-layers"}}})
    seen = []
    monkeypatch.setattr(serving, "measure", lambda record, key, *args: seen.append(key in record))
    for folder in ("x-24-layers", "x"):
        for name in ("write_model", "write_texts"):
            monkeypatch.setattr(serving, name, lambda *_, folder=folder: Path("models") / folder)
        serving.measure_rounds(record, "a", folder, [], [], 4, 3)
    assert seen == [True, False]


def test_depth_is_said_again_when_it_changes(tmp_path, gpu):
    record = write_record(tmp_path, "server", {})
    for gpu.gib, layers in ((78, 24), (139, 48)):
        depth.fit_model(record, "case", "qwen3-30b-a3b", 2)
        assert record.points["case/layers"]["layers"] == layers
    assert depth.rows(record.points, "case") == []
