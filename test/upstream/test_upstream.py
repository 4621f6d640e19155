"""What the stage reads of SGLang: which MoE runners rank the logits, ranks and schedulers, numbers of releases."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch

from sglang_xshare.upstream import routing, server
from sglang_xshare.upstream.release import is_since
from sglang_xshare.upstream.routing import hands_parts, keep_sums, read_output_format
from sglang_xshare.upstream.server import attention_dp_size, is_release, num_schedulers, wait_for_device

moe = pytest.importorskip("sglang.srt.layers.moe", reason="needs an installed SGLang")
import sglang  # noqa: E402
from sglang.srt.layers.moe.topk import TopK, TopKConfig  # noqa: E402
from sglang.srt.layers.moe.utils import MoeRunnerBackend  # noqa: E402


@pytest.mark.parametrize("name", ["triton_kernel", "flashinfer_trtllm", "flashinfer_mxfp4", "marlin"])
def test_a_format_decided_at_the_first_call_is_the_runner_backends(name, monkeypatch):
    monkeypatch.setattr(moe, "get_moe_runner_backend", lambda: MoeRunnerBackend(name))
    expected = {"triton_kernel": "triton_kernel", "marlin": "standard"}.get(name, "bypassed")
    assert read_output_format(TopKConfig(top_k=4, renormalize=True, output_format=None)) == expected


@pytest.mark.parametrize(("hip", "parts"), [(None, False), ("6.4", True)])
def test_on_amd_logits_may_still_be_in_parts(hip, parts, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    assert hands_parts() == parts
    monkeypatch.setattr(TopK, "forward_cuda", lambda self, hidden_states, router_logits: None)
    assert not hands_parts(), "before 0.5.23"


@pytest.mark.parametrize(("on_cuda", "scales", "renormalizes"), [(1, 0, True), (1, 1, False), (0, 0, False)])
def test_grouped_routers_with_a_bias_renormalize_on_cuda_before_0_5_22(on_cuda, scales, renormalizes, monkeypatch):
    """The release that scales routers without renormalization is also the first that does not renormalize them."""
    monkeypatch.setattr(routing, "routes_on", lambda flag: on_cuda and flag == "_is_cuda")
    monkeypatch.setattr(routing, "scales_unnormalized_groups", lambda: scales)
    assert routing.renormalizes_biased_groups() == renormalizes


def test_layers_that_rank_no_logits_are_not_looked_for():
    """As on a CPU, where a model's experts need no numbers."""
    keep_sums(None, set())


def test_a_device_is_waited_for_and_a_cpu_is_not(monkeypatch):
    waited = []
    devices = {name: SimpleNamespace(synchronize=lambda name=name: waited.append(name)) for name in ("cuda", "cpu")}
    monkeypatch.setattr(torch, "get_device_module", devices.get)
    for device in ("cpu", "cuda"):
        wait_for_device(device)
    assert waited == ["cuda"]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_server_is_ended_by_its_first_rank_and_each_rank_by_itself(is_first, monkeypatch):
    sent = []
    monkeypatch.setattr(server, "is_first_rank", lambda: is_first)
    monkeypatch.setattr(os, "kill", lambda *given: sent.append(given))
    with pytest.raises(SystemExit) as ended:
        server.end_server()
    assert (ended.value.code, sent) == (1, [(os.getppid(), signal.SIGQUIT)] * is_first)


@pytest.mark.parametrize(
    ("algorithm", "own", "places"),
    [("static", [[2, 0, 1]], [[2, 0, 1]]), ("dynamic", None, [[1, 2, 0]]), (None, [[2, 0, 1]], None)],
)
def test_an_expert_lies_at_the_replica_that_its_rank_dispatches_to(algorithm, own, places, monkeypatch):
    """Without a map for each rank, the expert lies at its first replica."""
    metadata = SimpleNamespace(logical_to_all_physical_map=torch.tensor([[[1, 3], [2, -1], [0, -1]]]))
    metadata.logical_to_rank_dispatch_physical_map = None if own is None else torch.tensor(own)
    monkeypatch.setattr("sglang.srt.eplb.expert_location.get_global_expert_location_metadata", lambda: metadata)
    found = routing.expert_locations(SimpleNamespace(ep_dispatch_algorithm=algorithm))
    assert (found if found is None else found.tolist()) == places


def test_the_release_that_runs_is_sglangs_own(monkeypatch):
    monkeypatch.setattr(sglang, "__version__", "0.5.23+xshare.0.1.0")
    assert is_release("0.5.23")
    monkeypatch.setattr(sglang, "__version__", "0.5.22")
    assert not is_release("0.5.23")


def test_ranks_are_told_from_replicas():
    for config, ranks, schedulers in (
        ({"dp_size": 1}, 1, 1),
        ({"dp_size": 2, "enable_dp_attention": False}, 1, 2),
        ({"dp_size": 2, "enable_dp_attention": True}, 2, 2),
        ({"dp_size": 1, "attn_dp_size": 4, "enable_dp_attention": False}, 4, 4),
        ({"dp_size": 2, "attn_dp_size": 2, "enable_dp_attention": True}, 2, 2),
    ):
        server_args = SimpleNamespace(**config)
        assert (config, attention_dp_size(server_args), num_schedulers(server_args)) == (config, ranks, schedulers)


def test_a_build_has_the_code_of_the_release_that_it_leads_to():
    for running, last, next_one in (
        ("0.5.9", "0.5.9", "0.5.17"),
        ("0.5.23", "0.5.23", "0.5.24"),
        ("0.5.23+xshare.0.1.0", "0.5.23", "0.5.24"),
        ("0.5.23.post1", "0.5.23", "0.5.24"),
        ("0.5.24rc1", "0.5.24", "0.5.25"),
        ("0.5.23.dev3+gabc", "0.5.23", "0.5.24"),
        ("0.6", "0.6.0", "0.6.1"),
        ("0.0.0.dev0", "0.0.0", "0.5.17"),
    ):
        assert (is_since(running, last), is_since(running, next_one)) == (True, False), running
    with pytest.raises(ValueError, match="unknown"):
        is_since("unknown", "0.5.23")
