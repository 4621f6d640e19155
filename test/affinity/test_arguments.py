"""The flags of expert-affinity dispatch: what is refused, in one line each."""

from dataclasses import replace
from pathlib import Path
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
def file(tmp_path: Path) -> Path:
    path = tmp_path / "table.safetensors"
    make_table().save(path)
    return path


def read(**flags: Any) -> Any:
    return read_affinity(SimpleNamespace(dp_size=4, **flags))


def test_another_method_reads_nothing() -> None:
    assert read() is None
    assert read(load_balance_method="round_robin", expert_affinity=None) is None


@pytest.mark.parametrize(("given", "bound"), [(None, DEFAULT), (1.25, 1.25), (1, 1)])
def test_the_flags_make_arguments(file: Path, given: float | None, bound: float) -> None:
    flags = {"expert_affinity": str(file), "expert_affinity_bound": given}
    arguments = read(load_balance_method="expert_affinity", **flags)
    assert (arguments.bound, arguments.table.origin) == (bound, ORIGIN)


METHODS = {"load_balance_method": "expert_affinity"}
FLAGS: dict[str, dict[str, Any]] = {
    "file alone": {"expert_affinity": "t"},
    "bound alone": {"expert_affinity_bound": 1.2},
    "method alone": METHODS,
    "missing": {**METHODS, "expert_affinity": "/no/t"},
    "bound": {**METHODS, "expert_affinity": "t", "expert_affinity_bound": 0.9},
    "no number": {**METHODS, "expert_affinity": "t", "expert_affinity_bound": float("nan")},
}
# What differs from a server that is served, and from its table's origin.
SERVERS: dict[str, dict[str, Any]] = {
    "one replica": {"dp_size": 1},
    "data-parallel attention of old": {"enable_dp_attention": True},
    "data-parallel attention": {"attn_dp_size": 2},
    "two machines": {"nnodes": 2},
    "a decode server": {"disaggregation_mode": "decode"},
    "gRPC": {"grpc_mode": True},
    "a port of gRPC": {"grpc_port": 30001},
    "SGLang's server in Rust": {"SGLANG_RUST_SERVER": True},
    "another vocabulary": {"vocabulary": 67},
    "another model": {"origin": {"model": "mixtral"}},
    "another tokenizer": {"origin": {"tokenizer": "ab" * 32}},
    "other experts": {"text": {"num_experts": 128}},
    "other layers": {"text": {"num_hidden_layers": 3}},
    "a dense layer": {"text": {"num_hidden_layers": 6, "mlp_only_layers": [0]}},
    "a first dense layer": {"text": {"num_hidden_layers": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1}},
}
REFUSED = FLAGS | SERVERS


def refuse(case: str, monkeypatch: pytest.MonkeyPatch, *_: Any) -> None:
    given = REFUSED[case]
    if case in FLAGS:
        read(**given)
    else:
        serve(monkeypatch, **given)


def serve(
    monkeypatch: pytest.MonkeyPatch,
    origin: dict[str, Any] | None = None,
    vocabulary: int = 66,
    text: Any = None,
    **differences: Any,
) -> None:
    """Check what differs from a server that is served, and from its table's origin."""
    usual = {"dp_size": 2, "attn_dp_size": 1, "enable_dp_attention": False, "nnodes": 1}
    config = {**usual, "disaggregation_mode": "null", "grpc_port": None, **differences}
    server_args = SimpleNamespace(**config, model_path=str(MODEL), expert_affinity="FILE")
    whole = SimpleNamespace(vocab_size=vocabulary, model_type="qwen3_moe", **(text or {}))
    model = SimpleNamespace(hf_config=whole, hf_text_config=whole)
    monkeypatch.setattr(affinity, "resolved", lambda args: args)
    monkeypatch.setattr(affinity, "is_switched_on", lambda name: config.get(name, False))
    monkeypatch.setattr(affinity, "model_config", lambda args: model)
    table = replace(make_table(), origin=replace(ORIGIN, **(origin or {})))
    check_affinity(server_args, affinity.AffinityArguments(table, 1.1))


def test_what_fits_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)
    serve(monkeypatch, {"tokenizer": hash_tokenizer(MODEL)})


@pytest.mark.parametrize(
    "text",
    [
        {"num_experts": 64, "num_hidden_layers": 4, "decoder_sparse_step": 1, "mlp_only_layers": []},
        {"num_experts": 64, "num_hidden_layers": 5, "decoder_sparse_step": 1, "mlp_only_layers": [2]},
        {"n_routed_experts": 64, "num_hidden_layers": 7, "first_k_dense_replace": 3, "moe_layer_freq": 1},
        {"num_local_experts": [64, 64], "num_hidden_layers": 4},
        {"num_experts": [64, 32], "num_hidden_layers": 8},
        {"num_experts": 64, "num_hidden_layers": 8, "decoder_sparse_step": 2, "mlp_only_layers": []},
        {"n_routed_experts": 64, "num_hidden_layers": 8, "moe_layer_freq": [0, 1] * 4, "first_k_dense_replace": 0},
    ],
    ids=["all", "one dense", "first dense", "listed", "differing", "every other", "by layer"],
)
def test_a_table_of_the_models_own_layers_and_experts_is_served(
    monkeypatch: pytest.MonkeyPatch, text: dict[str, Any]
) -> None:
    serve(monkeypatch, text=text)
