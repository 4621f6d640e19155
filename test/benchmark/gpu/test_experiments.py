"""Every experiment goes on where its record ends, and refuses models it does not know. Servers are stand-ins here."""

from functools import partial

import pytest
from gpu.recorded import served, write_record

from benchmark.gpu import checks, eagle3, kernels, layer, paged, replay, selection, server, tune
from benchmark.gpu.__main__ import NO_GPU, main
from benchmark.gpu.serving import Gain
from benchmark.gpu.table import list_rows
from refused import refused


def test_server_measures_what_is_missing_and_starts_nothing_when_nothing_is(tmp_path, gpu):
    key = server.point_key("gpt-oss-120b", 4)
    record = write_record(tmp_path, "server", {key: served(1.0, 1.0)})
    server.measure(record, ["gpt-oss-120b"])
    assert gpu.names == ["gpt-oss-120b-30-layers"]
    assert list(record.points) == [key, *(server.point_key("gpt-oss-120b", n) for n in (16, 1, 8, 32))]
    assert Gain.read(record.points[key]).off.throughput.median == 1.0
    server.measure(record, ["gpt-oss-120b"])
    assert gpu.names == ["gpt-oss-120b-30-layers"]
    server.measure(record, [])
    others = ["qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-120b-30-layers", "qwen3-30b-a3b"]
    assert gpu.names == ["gpt-oss-120b-30-layers", *others]


def test_replay_resumes_at_each_of_its_parts_and_tries_failed_tests_again(tmp_path, gpu, monkeypatch):
    ran = []

    def fail_once(paths):
        ran.append(paths)
        if len(ran) == 1:
            raise RuntimeError("3 of 90 tests failed\nat length")

    monkeypatch.setattr(replay, "run_tests", fail_once)
    counted = {"rows": 5292.0, "experts_before": 40.0, "experts_after": 30.0, "layer_steps": 756.0}
    record = write_record(tmp_path, "replay", dict.fromkeys(replay.LIVE, counted))
    replay.measure(record, ["server"])
    assert (ran, gpu.names) == ([], [replay.MODEL])
    assert set(record.points) == {*replay.LIVE, *(replay.masking_key(n) for n in replay.MASKED_AT)}
    with pytest.raises(RuntimeError, match="3 of 90 tests failed"):
        replay.measure(record, [])
    assert (replay.rows(record.points)[-1].measured, replay.rows(record.points)[-1].verdict) == (
        "3 of 90 tests failed",
        "miss",
    )
    for _ in range(2):
        replay.measure(record, [])
    assert (ran, gpu.names) == ([[replay.TESTS]] * 2, [replay.MODEL])
    assert replay.rows(record.points)[-1].verdict == "pass"


def test_alignment_compares_the_policy_with_itself():
    name = "qwen3-30b-a3b-aligned"
    off, on = server.CASES[name].variants
    assert on.server_args() == [*off.server_args(), "--expert-policy-align"]
    assert off.name != on.name
    points = {server.point_key(name, 4): served(100.0, 103.0), server.taken_key(name): {"taken": False}}
    taken, gain = server.rows(points)[:2]
    assert (taken.verdict, gain.measured) == ("miss", "3.0 % gain")


@pytest.mark.parametrize("broken", [False, True])
def test_tests_run_side_by_side(tmp_path, monkeypatch, capfd, broken):
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
    assert [record.points[path]["passed"] for path in selection.TESTS] == [False, *[True] * (len(selection.TESTS) - 1)]


def test_kernels_are_timed_even_where_an_id_differs(tmp_path, monkeypatch):
    time = kernels.Time("oea:k0=3", 16, 128, 3.0, 2.0, 4.0, 20.0)
    monkeypatch.setattr(kernels, "check_all", lambda *_: [f"topk_ids of case {n}" for n in range(12)])
    monkeypatch.setattr(kernels, "measure", lambda *_: time)
    record = write_record(tmp_path, "selection", {})
    with pytest.raises(RuntimeError, match="topk_ids of case 0"):
        selection.measure(record, ["kernels"])
    assert record.points["cases"]["passed"] is False
    assert record.points["cases"]["differences"] == [f"topk_ids of case {n}" for n in range(10)]
    assert len(record.points) == 1 + 4 * len(kernels.PLANS)


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


@pytest.mark.parametrize("experiment", [selection, layer, server, eagle3, replay, tune, paged])
def test_unknown_parts_are_refused(tmp_path, experiment):
    with pytest.raises(ValueError, match="part qwen4: "):
        experiment.measure(write_record(tmp_path, "any", {}), ["qwen4"])


@pytest.fixture
def run(monkeypatch):
    """Call it with whether there is a GPU and arguments."""

    def call(has_gpu, *arguments):
        monkeypatch.setattr("benchmark.gpu.__main__.has_gpu", lambda: has_gpu)
        monkeypatch.setattr("sys.argv", ["gpu", *arguments])
        return main()

    return call


def test_without_a_gpu_no_record_is_begun(tmp_path, run, capsys):
    assert run(False, "layer", "--out", str(tmp_path / "out")) == 2
    assert capsys.readouterr() == ("", NO_GPU + "\n")
    assert not (tmp_path / "out").exists()


def test_a_policy_is_for_experiment_tune_alone(tmp_path, run):
    with refused("--policy oea:k0=3"):
        run(True, "layer", "qwen3-30b-a3b", "--policy", "oea:k0=3", "--out", str(tmp_path))
