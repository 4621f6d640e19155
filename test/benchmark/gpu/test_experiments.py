"""Every experiment goes on where its record ends, and refuses models it does not know. Servers are stand-ins here."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
from gpu.recorded import served, write_record

from benchmark.gpu import checks, eagle3, kernels, layer, memory, replay, selection, server, tune
from benchmark.gpu.__main__ import NO_GPU, main
from benchmark.gpu.serving import Gain
from benchmark.gpu.table import list_rows
from sglang_xshare.stage.alignment import TAKEN


@pytest.fixture
def started(monkeypatch):
    """Names of the models for which servers were started, on an H200; rounds are measured in no time."""
    names = []
    monkeypatch.setattr(memory, "read_free_bytes", lambda: 139 << 30)

    @contextmanager
    def serve(name, variants, *args):
        names.append(name)
        yield [SimpleNamespace(log_text=lambda: f"... {TAKEN}") for _ in variants]

    def measure_rounds(record, key, *args):
        record.add(key, **served(100.0, 110.0, 3.0))

    for module in (server, eagle3, replay):
        monkeypatch.setattr(module, "serve_dummies", serve)
        monkeypatch.setattr(module, "measure_rounds", measure_rounds)
    return names


def test_server_measures_what_is_missing_and_starts_nothing_when_nothing_is(tmp_path, started):
    key = server.point_key("gpt-oss-120b", 4)
    record = write_record(tmp_path, "server", {key: served(1.0, 1.0)})
    server.measure(record, ["gpt-oss-120b"])
    assert started == ["gpt-oss-120b-30-layers"]
    assert list(record.points) == [key, *(server.point_key("gpt-oss-120b", n) for n in (16, 1, 8, 32))]
    assert Gain.read(record.points[key]).off.throughput.median == 1.0
    server.measure(record, ["gpt-oss-120b"])
    assert started == ["gpt-oss-120b-30-layers"]
    server.measure(record, [])
    others = ["qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-120b-30-layers", "qwen3-30b-a3b"]
    assert started == ["gpt-oss-120b-30-layers", *others]


def test_eagle3_measures_once(tmp_path, started):
    record = write_record(tmp_path, "eagle3", {})
    for _ in range(2):
        eagle3.measure(record, [])
    assert started == [eagle3.MODEL]
    assert [row.verdict for row in eagle3.rows(record.points)] == ["miss", "pass"]


def test_replay_resumes_at_each_of_its_parts(tmp_path, started, monkeypatch):
    ran = []
    monkeypatch.setattr(replay, "run_tests", ran.append)
    counted = {"rows": 5292.0, "experts_before": 40.0, "experts_after": 30.0, "layer_steps": 756.0}
    monkeypatch.setattr(replay, "_count", lambda one: counted)
    record = write_record(tmp_path, "replay", {"exact": counted})
    replay.measure(record, ["server"])
    assert (ran, started) == ([], [replay.MODEL])
    assert set(record.points) == {*replay.LIVE, *(replay.masking_key(n) for n in replay.MASKED_AT)}
    for _ in range(2):
        replay.measure(record, [])
    assert (ran, started) == ([[replay.TESTS]], [replay.MODEL])
    assert len(replay.rows(record.points)) == 6


def test_a_failed_test_is_recorded_with_its_reason_and_tried_again(tmp_path, monkeypatch):
    def fail(paths):
        raise RuntimeError("3 of 90 tests failed\nat length")

    record = write_record(tmp_path, "replay", {})
    monkeypatch.setattr(replay, "run_tests", fail)
    with pytest.raises(RuntimeError, match="3 of 90 tests failed"):
        replay.measure(record, ["tests"])
    (row,) = replay.rows(record.points)
    assert (row.measured, row.verdict) == ("3 of 90 tests failed", "miss")
    monkeypatch.setattr(replay, "run_tests", lambda paths: None)
    replay.measure(record, ["tests"])
    assert replay.rows(record.points)[0].verdict == "pass"


def test_alignment_compares_the_policy_with_itself(tmp_path, started):
    name = "qwen3-30b-a3b-aligned"
    off, on = server.CASES[name].variants
    assert on.server_args() == [*off.server_args(), "--expert-policy-align"]
    assert off.name != on.name
    record = write_record(tmp_path, "server", {server.point_key(name, 4): served(100.0, 103.0)})
    for _ in range(2):
        server.measure(record, [name])
    assert started == ["qwen3-30b-a3b"]
    rows = server.rows(record.points)
    assert [row.measured for row in rows] == ["taken by the runner", "3.0 % gain", "10.0 % gain"]
    assert server.rows({server.taken_key(name): {"taken": False}})[0].verdict == "miss"


@pytest.mark.parametrize("broken", [False, True])
def test_tests_run_side_by_side(tmp_path, monkeypatch, capfd, broken):
    monkeypatch.setattr(checks, "WORKERS", 2)
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    file = tmp_path / "test_made_up.py"
    file.write_text(
        "import pytest\ndef test_upstream(): assert False\n"
        "@pytest.mark.parametrize('n', [1, 2, 3], ids=['a a', 'b', 'c'])\n"
        f"def test_small(n): assert n < {3 if broken else 4}\n"
    )
    if broken:
        with pytest.raises(
            RuntimeError, match=r"1 of 3 tests failed on this GPU, first test_made_up.py::test_small\[c"
        ):
            checks.run_tests([str(file)], selection.NOT_UPSTREAM)
        assert "test_small[c]" in capfd.readouterr().out
    else:
        checks.run_tests([str(file)], selection.NOT_UPSTREAM)
        assert capfd.readouterr().out == "3 tests passed, or were skipped\n"


def test_no_test_is_no_success(tmp_path):
    with pytest.raises(RuntimeError, match="could not be collected"):
        checks.run_tests([str(tmp_path / "test_nothing.py")])


def test_a_test_of_selection_that_fails_stops_no_other(tmp_path, monkeypatch):
    def fail(paths, options):
        if paths == [selection.TESTS[0]]:
            raise RuntimeError("failed")

    monkeypatch.setattr(selection, "run_tests", fail)
    record = write_record(tmp_path, "selection", {})
    with pytest.raises(RuntimeError, match="failed"):
        selection.measure(record, ["tests"])
    assert [record.points[path]["passed"] for path in selection.TESTS] == [False, True, True]


def test_selection_times_the_shapes_that_are_missing(tmp_path, monkeypatch):
    timed = []

    def measure(rows, experts, policy):
        timed.append((rows, experts, policy))
        return kernels.Time(policy, rows, experts, 3.0, 2.0, 4.0, 20.0)

    monkeypatch.setattr(kernels, "PLANS", ("oea:k0=3", "xshare"))
    monkeypatch.setattr(kernels, "check_all", lambda cases, shapes: [])
    monkeypatch.setattr(kernels, "measure", measure)
    record = write_record(tmp_path, "selection", {"xshare/16x256": {"us": 1.0}})
    for _ in range(2):
        selection.measure(record, ["kernels"])
    shapes = [(16, 128), (16, 256), (64, 128), (64, 256)]
    wanted = [(*shape, plan) for shape in shapes for plan in ("oea:k0=3", "xshare")]
    assert timed == [one for one in wanted if one != (16, 256, "xshare")]
    assert record.points["cases"]["equal"] == len(kernels.make_cases(kernels.PLANS))
    assert record.points["oea:k0=3/64x256"]["upstream_sorted_us"] == 20.0


def test_kernels_are_timed_even_where_an_id_differs(tmp_path, monkeypatch):
    time = kernels.Time("oea:k0=3", 16, 128, 3.0, 2.0, 4.0, 20.0)
    monkeypatch.setattr(kernels, "PLANS", ("oea:k0=3",))
    monkeypatch.setattr(kernels, "check_all", lambda *_: [f"topk_ids of case {n}" for n in range(12)])
    monkeypatch.setattr(kernels, "measure", lambda *_: time)
    record = write_record(tmp_path, "selection", {})
    with pytest.raises(RuntimeError, match=r"12 of \d+ cases differ, the first: topk_ids of case 0"):
        selection.measure(record, ["kernels"])
    assert record.points["cases"]["passed"] is False
    assert record.points["cases"]["differences"] == [f"topk_ids of case {n}" for n in range(10)]
    assert len(record.points) == 5


def test_a_point_that_fails_costs_no_other_and_is_the_last_to_be_tried_again(tmp_path):
    asked, broken = [], {"a", "c"}

    def call(key):
        asked.append(key)
        if key in broken:
            raise RuntimeError(f"{key} does not launch\nat length")
        return {"us": 1.0}

    record = write_record(tmp_path, "tune", {"d": {"us": 2.0}})
    calls = {key: partial(call, key) for key in "abcd"}
    assert checks.measure_points(record, calls) == "a: a does not launch"
    assert {key: point["us"] for key, point in record.points.items() if "us" in point} == {"d": 2.0, "b": 1.0}
    broken.clear()
    del record.points["b"]
    asked.clear()
    assert list_failed(tmp_path) == [("a", "a does not launch"), ("c", "c does not launch")]
    assert checks.measure_points(record, calls) is None
    assert asked == ["b", "a", "c"]
    assert list_failed(tmp_path) == []


def list_failed(results):
    return [(row.what, row.measured) for _, row in list_rows(results) if row.bar == "measured"]


def test_a_lost_device_ends_the_task_at_once(tmp_path, monkeypatch):
    def lose():
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lose)
    record = write_record(tmp_path, "layer", {})
    with pytest.raises(RuntimeError, match="illegal memory access"):
        checks.measure_points(record, {"a": lose, "b": lambda: pytest.fail("without a device")})
    assert list(record.points) == [checks.FAILED + "a"]


@pytest.mark.parametrize("experiment", [selection, layer, server, eagle3, replay, tune])
def test_unknown_parts_are_refused(tmp_path, started, experiment):
    with pytest.raises(ValueError, match=r"part qwen4: .*allowed"):
        experiment.measure(write_record(tmp_path, "any", {}), ["qwen4"])
    assert started == []


def test_without_a_gpu_no_record_is_begun(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmark.gpu.__main__.has_gpu", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu", "layer", "--out", str(tmp_path / "out")])
    assert main() == 2
    assert capsys.readouterr() == ("", NO_GPU + "\n")
    assert not (tmp_path / "out").exists()


def test_a_policy_is_for_experiment_tune_alone(tmp_path, monkeypatch):
    tuned = []
    monkeypatch.setattr("benchmark.gpu.__main__.has_gpu", lambda: True)
    monkeypatch.setattr(tune, "measure", lambda record, models, **options: tuned.append((models, options)))
    arguments = ["qwen3-30b-a3b", "--policy", "oea:k0=3", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["gpu", "tune", *arguments])
    assert main() == 0
    assert tuned == [(["qwen3-30b-a3b"], {"policy": "oea:k0=3"})]
    monkeypatch.setattr("sys.argv", ["gpu", "layer", *arguments])
    with pytest.raises(ValueError, match="--policy oea:k0=3: experiment layer takes none; allowed is experiment tune"):
        main()
