"""The GPU benchmark of the Triton kernel, as far as a machine without one can run it."""

from types import SimpleNamespace

import pytest
import torch

from benchmark.common.plan import parse_plan
from benchmark.gpu.selection import read_times
from benchmark.kernels import gpu_selection
from sglang_xshare import Batch, Router
from sglang_xshare.selection.triton_kernel import supports
from sglang_xshare.types import Alignment


def test_without_a_gpu_it_measures_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu_selection, "has_gpu", lambda: False)
    out = tmp_path / "times.json"
    assert gpu_selection.main(["--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == gpu_selection.NO_GPU + "\n"
    assert not out.exists()


def test_a_wrong_plan_is_one_line(capsys):
    with pytest.raises(SystemExit) as exit:
        gpu_selection.main(["xshare:k0=-1"])
    assert exit.value.code == 2
    assert "k0 = -1: allowed is an integer of at least 0" in capsys.readouterr().err.splitlines()[-1]


def test_every_case_is_served():
    for rows, experts, plan, _, _ in gpu_selection.make_cases(gpu_selection.PLANS):
        batch = Batch(tokens_per_request=4 if "per_request" in plan and rows % 4 == 0 else 1)
        assert supports(parse_plan(plan), Router(8), batch, rows, experts)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """As if there were one on which everything takes 3 us, beside 2 us of upstream's."""
    monkeypatch.setattr(gpu_selection, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu_selection, "check_all", lambda *_: None)
    monkeypatch.setattr(
        gpu_selection, "measure", lambda *shape: gpu_selection.Time(shape[2], *shape[:2], 3.0, 2.0, 4.0, 20.0)
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


@pytest.mark.usefixtures("on_a_gpu")
def test_the_gpu_stage_reads_what_it_writes(capsys, tmp_path):
    out = tmp_path / "times.json"
    assert gpu_selection.main(["oea:k0=3", "--out", str(out)]) == 0
    content = read_times(out)
    assert content["cases"] == len(gpu_selection.make_cases(["oea:k0=3"]))
    assert [(one["rows"], one["experts"]) for one in content["times"]] == [(16, 128), (16, 256), (64, 128), (64, 256)]
    printed = capsys.readouterr().out
    assert "1.50" in printed
    assert "20.00" in printed


@pytest.fixture
def sorted_batch(monkeypatch):
    """Filled slots, and how upstream sorts them: an expert's in any order."""
    ids = torch.tensor([[2, 0], [1, 2], [2, 2]], dtype=torch.int32)
    upstream = [torch.tensor(x, dtype=torch.int32) for x in ([1, 6, 2, 6, 5, 4, 3, 0], [0, 1, 2, 2], [8])]
    monkeypatch.setattr(gpu_selection, "BLOCK_SIZE", 2)
    monkeypatch.setattr(gpu_selection, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_selection, "_import_align", lambda: lambda *args: upstream)

    def make(slots, experts, length):
        tensors = [torch.tensor(x, dtype=torch.int32) for x in (slots, experts, [length])]
        return SimpleNamespace(topk_ids=ids, alignment=Alignment(*tensors, 2))

    return make


@pytest.mark.parametrize(
    ("slots", "experts", "length", "right"),
    [
        ([1, 6, 2, 6, 0, 3, 4, 5, 6, 6], [0, 1, 2, 2, 77], 8, True),
        ([1, 6, 2, 6, 0, 3, 4, 4, 6, 6], [0, 1, 2, 2, 77], 8, False),
        ([2, 6, 1, 6, 0, 3, 4, 5, 6, 6], [0, 1, 2, 2, 77], 8, False),
        ([1, 6, 2, 6, 0, 3, 4, 5, 6, 6], [0, 1, 1, 2, 77], 8, False),
        ([1, 6, 2, 6, 0, 3, 4, 5, 6, 6], [0, 1, 2, 2, 77], 10, False),
    ],
    ids=["as upstream's", "a slot twice", "slots of other experts", "another block's expert", "longer"],
)
def test_sorted_slots_are_held_to_upstreams(sorted_batch, slots, experts, length, right):
    assert gpu_selection._is_sorted(sorted_batch(slots, experts, length), 3) is right


@pytest.mark.usefixtures("on_a_gpu")
def test_a_difference_stops_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu_selection, "check_all", lambda *_: "topk_ids of oea:k0=3 on 1 x 8: not the reference's")
    out = tmp_path / "times.json"
    assert gpu_selection.main(["--out", str(out)]) == 1
    assert "not the reference's" in capsys.readouterr().err
    assert not out.exists()
