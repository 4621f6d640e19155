"""The flags of expert-affinity dispatch: what is refused, in one line each."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from affinity.tables import ORIGIN, make_table
from benchmark.common.paths import ROOT
from sglang_xshare.affinity import arguments as affinity
from sglang_xshare.affinity.arguments import check_affinity, read_affinity
from sglang_xshare.affinity.decision import DEFAULT
from sglang_xshare.affinity.table import hash_tokenizer

MODEL = ROOT / "checkpoints" / "qwen3-moe-tiny"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "table.safetensors"
    make_table().save(path)
    return path


def read(**flags: Any) -> Any:
    return read_affinity(SimpleNamespace(dp_size=4, **flags))


@pytest.mark.parametrize(("given", "bound"), [(None, DEFAULT), (1.25, 1.25), (1, 1)])
def test_the_flags_make_arguments(file, given, bound):
    flags = {"expert_affinity": str(file), "expert_affinity_bound": given}
    table, found = read(load_balance_method="expert_affinity", **flags)
    assert (found, table.origin) == (bound, ORIGIN)


METHODS = {"load_balance_method": "expert_affinity"}
FLAGS: dict[str, dict[str, Any]] = {
    "file alone": {"expert_affinity": "t"},
    "bound alone": {"expert_affinity_bound": 1.2},
    "method alone": METHODS,
    "missing": {**METHODS, "expert_affinity": "/no/t"},
    "bound": {**METHODS, "expert_affinity": "t", "expert_affinity_bound": 0.9},
    "no number": {**METHODS, "expert_affinity": "t", "expert_affinity_bound": float("nan")},
    "no bound at all": {**METHODS, "expert_affinity": "t", "expert_affinity_bound": float("inf")},
}
# What differs from a server that is served, and from its table's origin.
SERVERS: dict[str, dict[str, Any]] = {
    "one replica": {"dp_size": 1},
    "data-parallel attention of old": {"enable_dp_attention": True},
    "data-parallel attention": {"attn_dp_size": 2},
    "two machines": {"nnodes": 2},
    "a decode server": {"disaggregation_mode": "decode"},
    "gRPC": {"grpc_mode": True},
    "gRPC of the model gateway": {"smg_grpc_mode": True},
    "a port of gRPC": {"grpc_port": 30001},
    "SGLang's server in Rust": {"SGLANG_RUST_SERVER": True},
    "another vocabulary": {"text": {"vocab_size": 67}},
    "another model": {"text": {"model_type": "mixtral"}},
    "another tokenizer": {"tokenizer": "ab" * 32},
    "other experts": {"text": {"num_experts": 128}},
    "other layers": {"text": {"num_hidden_layers": 3}},
}
REFUSED = FLAGS | SERVERS


def refuse(case: str, monkeypatch: pytest.MonkeyPatch, *_: Any) -> None:
    given = REFUSED[case]
    if case in FLAGS:
        read(**given)
    else:
        serve(monkeypatch, **given)


def serve(monkeypatch: pytest.MonkeyPatch, tokenizer: str = "", text: Any = None, **differences: Any) -> None:
    """Check what differs from a server that is served, and from its table's origin."""
    usual: dict[str, Any] = {"dp_size": 2, "attn_dp_size": 1, "enable_dp_attention": False, "nnodes": 1}
    usual |= {"disaggregation_mode": "null", "grpc_port": None, "model_path": str(MODEL)}
    config = usual | differences
    server_args = SimpleNamespace(**config, expert_affinity="FILE")
    own = {"vocab_size": 66, "model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 64}
    model = SimpleNamespace(hf_text_config=SimpleNamespace(**own | (text or {})))
    monkeypatch.setattr(affinity, "resolved", lambda args: args)
    monkeypatch.setattr(affinity, "is_switched_on", lambda name: config.get(name, False))
    monkeypatch.setattr(affinity, "model_config", lambda args: model)
    check_affinity(server_args, replace(make_table(), origin=ORIGIN | {"tokenizer": tokenizer}))


def test_what_fits_is_served(monkeypatch):
    serve(monkeypatch)
    serve(monkeypatch, hash_tokenizer(MODEL))
    serve(monkeypatch, "ab" * 32, model_path="Qwen/Qwen3-30B-A3B")  # a name on the Hub has no tokenizer to compare
