"""What all-to-all expert parallelism is served with, where no release need say so; see `test_dp_attention.py`."""

from types import SimpleNamespace

import pytest

from sglang_xshare.admission.all_to_all import BACKENDS, REASONS, check_model
from sglang_xshare.admission.architectures import ALL_TO_ALL, DISPATCHED
from sglang_xshare.admission.model import check_rows
from sglang_xshare.admission.modes import UNSYNCHRONIZED, check_modes
from sglang_xshare.admission.moe_model import MoeModel
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.refusal import ExpertPolicyError

NO_POLICY = "cannot be served with an expert policy"


def config(**changes: object) -> SimpleNamespace:
    known = {
        **{"disaggregation_mode": "null", "moe_runner_backend": "auto", "moe_a2a_backend": "deepep"},
        **{"speculative_algorithm": None, "dp_size": 1, "tp_size": 4},
    }
    return SimpleNamespace(**known | changes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_that_drop_an_empty_slot_are_served(backend):
    check_modes(config(moe_a2a_backend=backend))


@pytest.mark.parametrize("backend", [*REASONS, "flashinfer", "mori", "customized"])
def test_every_other_backend_is_refused(backend):
    line = f"^--moe-a2a-backend {backend}: {NO_POLICY}: .*; allowed is none, deepep, mooncake, nixl$"
    with pytest.raises(ExpertPolicyError, match=line):
        check_modes(config(moe_a2a_backend=backend))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"moe_dense_tp_size": 1}, "--moe-dense-tp-size 1: .* an all-to-all backend is none"),
        ({"attn_cp_size": 2}, "--attn-cp-size 2: .* an all-to-all backend is 1"),
        ({"disable_attn_tp_gather": True}, "--disable-attn-tp-gather on: .* an all-to-all backend is off"),
        ({"enable_waterfill": True, "attn_dp_size": 2}, "--enable-waterfill on: .* data-parallel attention is off"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap on: .* the router sees half a batch"),
    ],
)
def test_what_would_change_the_ranks_rows_is_refused(changes, said):
    with pytest.raises(ExpertPolicyError, match=f"^{said}"):
        check_modes(config(**changes))


def test_ranks_must_be_synchronized(monkeypatch):
    monkeypatch.setenv(UNSYNCHRONIZED, "1")
    with pytest.raises(
        ExpertPolicyError, match=f"^{UNSYNCHRONIZED} 1: .*ranks of an all-to-all backend would not know"
    ):
        check_modes(config())


@pytest.mark.parametrize(
    ("architecture", "backend", "served"),
    [
        *((name, "deepep", True) for name in sorted(ALL_TO_ALL)),
        *((name, backend, name in DISPATCHED) for name in sorted(ALL_TO_ALL) for backend in ("mooncake", "nixl")),
        ("GptOssForCausalLM", "deepep", False),
        ("MixtralForCausalLM", "mooncake", False),
        ("MixtralForCausalLM", "none", True),
    ],
)
def test_models_whose_layers_were_followed(architecture, backend, served):
    model = MoeModel("folder", architecture, 4, 64, 8, "softmax", True)
    if served:
        check_model(model, config(moe_a2a_backend=backend))
        return
    line = (
        f"^--model-path folder: {NO_POLICY}: {architecture} is not known to have all-to-all expert parallelism by "
        f"{backend}; allowed"
    )
    with pytest.raises(ExpertPolicyError, match=line):
        check_model(model, config(moe_a2a_backend=backend))


def test_a_rank_alone_has_whole_requests_where_none_shares_them():
    schedule = build_schedule("xshare", {"k0": 1, "add": 0, "add_per_request": 4, "rows": "rank"}, speculative=True)
    speculating = {"speculative_algorithm": "EAGLE3", "enable_dp_attention": True}
    check_rows(schedule, config(**speculating, attn_dp_size=4))
    with pytest.raises(ExpertPolicyError, match="2 ranks divide the rows of a batch, which splits requests"):
        check_rows(schedule, config(**speculating, attn_dp_size=2))
