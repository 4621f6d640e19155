"""How the selection kernel is cut into programs, by times that no GPU took; what it is checked and timed on."""

import json
import shutil
from pathlib import Path

import pytest

from benchmark.common.variant import parse_plan
from benchmark.gpu import selection, shapes
from benchmark.gpu.checks import FAILED
from benchmark.gpu.shapes import Trial, choose, describe, list_trials, write_shapes
from sglang_xshare import Batch, Router
from sglang_xshare.selection.triton_kernel import supports, tile


def make_points(time, experts=shapes.EXPERTS):
    """The points of a record in which every trial of these experts took `time(trial)`."""
    return {trial.key: {"trial_us": time(trial)} for trial in list_trials() if trial.experts in experts}


@pytest.mark.parametrize(
    ("time", "chosen"),
    [
        (lambda one: one.tile, {"one": {"8": 2}, "several": [8, 4]}),
        (lambda one: 100 - one.tile - one.warps / 100, {"one": {"8": 4, "16": 8, "32": 16, "64": 32}}),
        (lambda one: 5.0 if one.tile == one.rows else 6.0, {"one": {"8": 2, "16": 4, "32": 8, "64": 16}}),
        (lambda one: one.rows / 16 if one.tile == one.rows else 2.5, {"one": {"8": 2, "16": 4, "32": 8}}),
        (lambda one: 9.9 if one.tile == one.rows else 10.0, {"one": {"8": 2}, "several": [8, 4]}),
    ],
    ids=["small programs", "large ones", "one program", "one program up to 32 rows", "one not faster by enough"],
)
def test_the_fastest_is_chosen(time, chosen):
    (found,) = choose(make_points(time, [128]))
    assert found["experts"] == 128
    assert {name: found[name] for name in chosen} == chosen
    assert len(describe(make_points(time, [128]))) == 1


def test_a_trial_that_failed_is_nobodys_fastest():
    points = make_points(lambda one: one.tile, [128])
    fastest = Trial(128, shapes.MANY_ROWS, 8, 4).key
    points[FAILED + fastest] = {"reason": "out of resource"}
    assert choose(points)[0]["several"] == [8, 4]  # measured since
    del points[fastest]
    assert choose(points)[0]["several"] == [8, 8]
    for trial in [one for one in list_trials() if one.experts == 128 and one.tile == one.rows == 16]:
        points[FAILED + trial.key] = points.pop(trial.key)
    assert choose(points)[0]["one"] == {"8": 2}


def test_the_kernel_reads_what_is_written(tmp_path, monkeypatch):
    copied = Path(shutil.copy(tile.SHAPES_FILE, tmp_path))
    monkeypatch.setattr(tile, "SHAPES_FILE", copied)
    before = {shape.experts: shape for shape in tile.load_shapes(copied)}
    write_shapes(make_points(lambda one: one.tile, [128]), "a GPU")
    after = {shape.experts: shape for shape in tile.load_shapes(copied)}
    assert after == before | {128: tile.Shape(128, {8: 2}, (8, 4))}
    origin = json.loads(copied.read_text())["origin"]
    assert "a GPU" in origin
    assert "128 experts" in origin


def test_every_case_is_served():
    for rows, experts, plan, _, _ in selection.make_cases():
        batch = Batch(tokens_per_request=selection.count_tokens(plan, rows))
        assert supports(parse_plan(plan), Router(8), batch, rows, experts)
    assert selection.count_tokens("xshare:k0=1,add_per_request=4", 16) == 4
