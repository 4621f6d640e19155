"""Flags and backends that are refused, where it takes no release to resolve them."""

from types import SimpleNamespace

import pytest

from sglang_xshare.admission.modes import SIMULATIONS, UNSYNCHRONIZED, check_aligned, check_modes
from sglang_xshare.refusal import ExpertPolicyError

NO_POLICY = "cannot be served with an expert policy"


@pytest.mark.parametrize("value", ["true", "y"])
@pytest.mark.parametrize("name", SIMULATIONS)
def test_upstreams_simulated_routing_is_refused(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(
        ExpertPolicyError, match=f"^{name} {value}: {NO_POLICY}: it overwrites what was selected; allowed"
    ):
        check_modes(SimpleNamespace())


@pytest.mark.parametrize("device", ["npu", "xpu", "musa:0"])
def test_a_device_whose_routers_pass_the_stage_by_is_refused(device):
    line = f"^--device {device.partition(':')[0]}: {NO_POLICY}: allowed is cuda, cpu$"
    with pytest.raises(ExpertPolicyError, match=line):
        check_modes(SimpleNamespace(device=device))


def test_experts_on_a_cpu_beside_a_gpu_are_refused():
    line = f"^--kt-weight-path folder: {NO_POLICY}: what its CPU kernels make of an empty slot is not known; allowed"
    with pytest.raises(ExpertPolicyError, match=line):
        check_modes(SimpleNamespace(kt_weight_path="folder"))


def test_ranks_must_be_synchronized(monkeypatch):
    monkeypatch.setenv(UNSYNCHRONIZED, "1")
    server = SimpleNamespace(
        disaggregation_mode="null", moe_runner_backend="auto", moe_a2a_backend="none", speculative_algorithm=None
    )
    check_modes(server)
    server.attn_dp_size = 2
    line = f"^{UNSYNCHRONIZED} 1: {NO_POLICY}: ranks of data-parallel attention would not know .*; allowed is unset$"
    with pytest.raises(ExpertPolicyError, match=line):
        check_modes(server)


@pytest.mark.parametrize("dispatch", ["dynamic", "lp"])
def test_replicas_must_not_depend_on_the_row(dispatch):
    server = SimpleNamespace(
        disaggregation_mode="null", moe_runner_backend="auto", moe_a2a_backend="none", speculative_algorithm=None
    )
    server.ep_num_redundant_experts, server.ep_dispatch_algorithm = 0, dispatch
    check_modes(server)
    server.ep_num_redundant_experts, server.ep_dispatch_algorithm = 2, "static"
    check_modes(server)
    server.ep_dispatch_algorithm = dispatch
    line = f"^--ep-num-redundant-experts 2: {NO_POLICY}: {dispatch} dispatch picks replicas by row, .*; "
    static = "allowed is 0, or --ep-dispatch-algorithm static"
    with pytest.raises(ExpertPolicyError, match=f"{line}{static} with an all-to-all backend$"):
        check_modes(server)
    server.moe_a2a_backend = "deepep"
    with pytest.raises(ExpertPolicyError, match=f"{line}{static}$"):
        check_modes(server)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"device": "cpu"}, "--device cpu has no Triton MoE runner; allowed is cuda"),
        ({"moe_runner_backend": "marlin"}, "the MoE runner marlin sorts for itself; allowed is --moe-runner"),
        ({"ep_size": 2}, "--ep-size 2 renumbers the experts of each rank; allowed is 1"),
        ({"attn_dp_size": 2}, "data-parallel attention may mask ids"),
        ({"enable_dp_attention": True, "dp_size": 2}, "data-parallel attention may mask ids"),
        ({"kt_weight_path": "folder"}, "--kt-weight-path masks ids"),
    ],
)
def test_servers_whose_runner_sees_other_ids(changes, named):
    served = {
        "device": "cuda",
        "moe_runner_backend": "triton",
        "ep_size": 1,
        "dp_size": 1,
        "attn_dp_size": 1,
        "kt_weight_path": None,
    }
    check_aligned(SimpleNamespace(**served))
    with pytest.raises(ExpertPolicyError, match=f"^--expert-policy-align: {named}"):
        check_aligned(SimpleNamespace(**served | changes))
