"""Experiment `routing`: which of two sets of arrays differ."""

from collections import namedtuple
from dataclasses import dataclass, replace

import pytest
import torch

from benchmark.gpu import routing
from selection.routing import draw_routing, reference

Output = namedtuple("Output", ["a_ragged_metadata", "gather_indx", "scatter_indx", "gate_scal", "n_expts_act"])


@dataclass
class Metadata:
    """`RaggedTensorMetadata` of triton_kernels."""

    slice_sizes: torch.Tensor
    slice_offs: torch.Tensor
    block_offs_data: torch.Tensor
    block_schedule_data: torch.Tensor


def make(renumber=False):
    """Return the output of SGLang 0.5.23's router for 16 rows and 32 experts."""
    arrays = reference(*draw_routing("random", 16, 32, 4), 32, torch.float32, renumber)
    metadata = Metadata(arrays["histogram"], arrays["starts"], arrays["block_starts"], arrays["schedule"])
    return Output(metadata, arrays["rows"], arrays["by_expert"], arrays["gates"], 4)


def test_what_lies_behind_the_last_block_may_differ():
    old = make()
    metadata = old.a_ragged_metadata
    longer = torch.cat([metadata.block_schedule_data, torch.zeros(4, 9, dtype=torch.int32)], 1)
    new = old._replace(a_ragged_metadata=replace(metadata, block_schedule_data=longer))
    assert routing.find_differences(old, new) == []
    longer[2, 0] += 1
    assert routing.find_differences(old, new) == ["routing.0.block_schedule_data.2"]


def test_slots_of_a_row_in_another_order():
    assert routing.find_differences(make(renumber=True), make()) == ["routing.2"]


@pytest.mark.parametrize("field", ["gather_indx", "scatter_indx", "gate_scal"])
def test_a_wrong_row_or_weight_is_found(field):
    old = make()
    wrong = getattr(old, field).clone()
    wrong[[0, -1]] = wrong[[-1, 0]]
    assert wrong[0] != wrong[-1]
    found = routing.find_differences(old, old._replace(**{field: wrong}))
    assert found == [f"routing.{Output._fields.index(field)}"]
