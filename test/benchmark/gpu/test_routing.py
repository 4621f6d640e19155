"""Experiment `routing`: what differs of two sets of arrays, and what a layer computes from each."""

from collections import namedtuple
from dataclasses import dataclass, replace
from math import inf

import pytest
import torch

from benchmark.gpu import routing
from selection.routing import draw_routing, reference

ROWS, EXPERTS = 16, 32
Output = namedtuple("Output", ["a_ragged_metadata", "gather_indx", "scatter_indx", "gate_scal", "n_expts_act"])


@dataclass
class Metadata:
    """`RaggedTensorMetadata` of triton_kernels."""

    slice_sizes: torch.Tensor
    slice_offs: torch.Tensor
    block_offs_data: torch.Tensor
    block_schedule_data: torch.Tensor


@dataclass
class Pair:
    """`GatherIndx` and `ScatterIndx` of SGLang 0.5.17's triton_kernels."""

    src_indx: torch.Tensor
    dst_indx: torch.Tensor


@dataclass
class Data:
    """`RoutingData` of SGLang 0.5.17's triton_kernels."""

    gate_scal: torch.Tensor
    expt_hist: torch.Tensor
    n_expts_act: int
    expt_data: Metadata


def make(case="random", renumber=False):
    """Return the output of SGLang 0.5.23's router for 16 rows and 32 experts."""
    arrays = reference(*draw_routing(case, ROWS, EXPERTS, 4), EXPERTS, torch.float32, renumber)
    metadata = Metadata(arrays["histogram"], arrays["starts"], arrays["block_starts"], arrays["schedule"])
    return Output(metadata, arrays["rows"], arrays["by_expert"], arrays["gates"], 4)


def make_records(case="random"):
    """Return the output of SGLang 0.5.17's router for the same batch."""
    arrays = reference(*draw_routing(case, ROWS, EXPERTS, 4), EXPERTS, torch.float32, True)
    metadata = Metadata(arrays["histogram"], arrays["starts"], arrays["block_starts"], arrays["schedule"])
    data = Data(arrays["gates"], arrays["histogram"], 4, metadata)
    by_row, by_expert = arrays["by_row"], arrays["by_expert"]
    return data, Pair(by_expert, by_row), Pair(by_row, by_expert)


def compare(old, new):
    return routing.find_differences(old, new), routing.compare_layers(old, new, ROWS, EXPERTS)


def test_what_lies_behind_the_last_block_may_differ():
    old = make()
    metadata = old.a_ragged_metadata
    longer = torch.cat([metadata.block_schedule_data, torch.zeros(4, 9, dtype=torch.int32)], 1)
    new = old._replace(a_ragged_metadata=replace(metadata, block_schedule_data=longer))
    assert compare(old, new) == ([], 0.0)
    longer[2, 0] += 1
    assert compare(old, new)[0] == ["routing.0.block_schedule_data.2"]


def test_slots_of_a_row_in_another_order():
    """The arrays tell the numberings apart, and the layer is the same."""
    assert compare(make(), make()) == compare(make_records(), make_records()) == ([], 0.0)
    names, error = compare(make(renumber=True), make())
    assert names == ["routing.2"]
    assert 0 <= error < 1e-6


@pytest.mark.parametrize("field", ["gather_indx", "scatter_indx", "gate_scal"])
def test_a_wrong_row_or_weight_changes_the_layer(field):
    old = make()
    wrong = getattr(old, field).clone()
    wrong[[0, -1]] = wrong[[-1, 0]]
    assert wrong[0] != wrong[-1]
    names, error = compare(old, old._replace(**{field: wrong}))
    assert names == [f"routing.{Output._fields.index(field)}"]
    assert error > routing.LAYER_ERROR


def test_a_slot_that_no_place_writes():
    """From 0.5.18 on a runner adds up what its memory held there; 0.5.17's leaves the slot out."""
    assert compare(make(), make("holes"))[1] == inf
    ids, weights = draw_routing("holes", ROWS, EXPERTS, 4)
    hidden, experts = torch.randn(ROWS, 8), torch.randn(EXPERTS, 8, 6)
    expected = torch.einsum("rk,rd,rkdo->ro", weights, hidden, experts[ids.long().clamp_min(0)])
    torch.testing.assert_close(routing.compute_layer(make_records("holes"), hidden, experts), expected)
    found = [routing.compute_layer(routed, hidden, experts) for routed in (make(), make_records())]
    torch.testing.assert_close(*found)


def test_a_layer_beyond_the_bar_is_a_miss():
    assert [row.verdict for row in routing.rows({"one": {"layer_error": 0.5}})] == ["miss"]
    assert [row.verdict for row in routing.rows({"one": {"layer_error": 0.0}})] == ["pass"]
