"""Results travel as at most eight flat files, each small enough; what is deeper in one archive."""

import random
import tarfile

from benchmark.gpu import bring_back as module
from benchmark.gpu.bring_back import FLAT, MORE, MOST_FILES, bring_back, keep_logs, unpack


def make_results(folder):
    texts = {name: name for name in (*FLAT, "tune.json", "moe-configs/configs/triton_3_6_0/E=128.json")}
    for name, text in {**texts, "logs/server-qwen/off-1.log": "last words"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def names(path):
    with tarfile.open(path) as archive:
        return archive.getnames()


def test_flat_files_and_one_archive(tmp_path):
    brought = bring_back(make_results(tmp_path / "results"), tmp_path / "out")
    assert [path.name for path in brought] == sorted([*FLAT, MORE])
    assert len(brought) <= MOST_FILES
    assert names(tmp_path / "out" / MORE) == [
        "logs/server-qwen/off-1.log",
        "moe-configs/configs/triton_3_6_0/E=128.json",
        "tune.json",
    ]
    assert (tmp_path / "out" / "layer.json").read_text() == "layer.json"
    unpack(tmp_path / "out")
    there = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert there == {*FLAT, "tune.json", "moe-configs/configs/triton_3_6_0/E=128.json", "logs/server-qwen/off-1.log"}


def test_a_partial_folder_comes_back_as_it_is(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "run.json").write_text("{}")
    assert [path.name for path in bring_back(tmp_path / "results", tmp_path / "out")] == ["run.json"]


def test_logs_stay_behind_where_the_archive_would_be_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 2000)
    results = make_results(tmp_path / "results")
    (results / "logs" / "server-qwen" / "on-2.log").write_bytes(random.Random(0).randbytes(5000))
    (results / "server.json").write_text("x" * 2001)  # packs well
    bring_back(results, tmp_path / "out")
    assert not (tmp_path / "out" / "server.json").exists()
    assert set(names(tmp_path / "out" / MORE)) == {
        "moe-configs/configs/triton_3_6_0/E=128.json",
        "server.json",
        "tune.json",
    }


def test_the_ends_of_a_steps_own_logs_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(module, "LOG_BYTES", 4)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "off-1.log").write_text("123456")
    keep_logs(tmp_path / "results", "server gpt-oss-20b", since=0.0)
    kept = tmp_path / "results" / "logs" / "server-gpt-oss-20b"
    assert (kept / "off-1.log").read_text() == "3456"
    keep_logs(tmp_path / "results", "server gpt-oss-20b", since=9e9)  # its second turn wrote none
    assert not kept.exists()
