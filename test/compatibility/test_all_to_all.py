"""What all-to-all expert parallelism is served with, where no release need say so; see `test_dp_attention.py`."""

from types import SimpleNamespace

import pytest

from refused import refused
from sglang_xshare.compatibility.all_to_all import check_model
from sglang_xshare.compatibility.architectures import ALL_TO_ALL, DISPATCHED
from sglang_xshare.compatibility.moe_model import MoeModel
from sglang_xshare.compatibility.schedule import check_rows
from sglang_xshare.policies.schedule import build_schedule


def config(**changes: object) -> SimpleNamespace:
    known = {
        **{"disaggregation_mode": "null", "moe_runner_backend": "auto", "moe_a2a_backend": "deepep"},
        **{"speculative_algorithm": None, "dp_size": 1, "tp_size": 4},
    }
    return SimpleNamespace(**known | changes)


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
    with refused("--model-path folder"):
        check_model(model, config(moe_a2a_backend=backend))


def test_a_rank_alone_has_whole_requests_where_none_shares_them():
    schedule = build_schedule("xshare", {"k0": 1, "add": 0, "add_per_request": 4, "rows": "rank"}, speculative=True)
    speculating = {"speculative_algorithm": "EAGLE3", "enable_dp_attention": True}
    check_rows(schedule, config(**speculating, attn_dp_size=4))
    with refused("--expert-policy-config rows rank"):
        check_rows(schedule, config(**speculating, attn_dp_size=2))
