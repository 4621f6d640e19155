"""The flags of expert-affinity dispatch: what is refused, in one line each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from affinity.tables import ORIGIN, make_table
from sglang_xshare.affinity import arguments as affinity
from sglang_xshare.affinity.arguments import check_affinity, read_affinity
from sglang_xshare.affinity.bound import DEFAULT
from sglang_xshare.affinity.table import hash_tokenizer
from sglang_xshare.refusal import ExpertPolicyError

METHOD = "--load-balance-method expert_affinity"


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
    assert (arguments.bound, arguments.replicas, arguments.table.origin) == (bound, 4, ORIGIN)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"expert_affinity": "t"}, f"--expert-affinity t: allowed only together with {METHOD}"),
        ({"expert_affinity_bound": 1.2}, f"--expert-affinity-bound 1.2: allowed only together with {METHOD}"),
        (
            {"load_balance_method": "expert_affinity"},
            f"{METHOD}: allowed with --expert-affinity FILE, which `sglang-xshare calibrate` makes",
        ),
        (
            {"load_balance_method": "expert_affinity", "expert_affinity": "/no/t"},
            "--expert-affinity /no/t: No such file or directory: /no/t; allowed is a file of `sglang-xshare calibrate`",
        ),
        (
            {"load_balance_method": "expert_affinity", "expert_affinity": "t", "expert_affinity_bound": 0.9},
            "--expert-affinity-bound 0.9: allowed is a number of at least 1, such as 1.175",
        ),
        (
            {"load_balance_method": "expert_affinity", "expert_affinity": "t", "expert_affinity_bound": float("nan")},
            "--expert-affinity-bound nan: allowed is a number of at least 1, such as 1.175",
        ),
    ],
    ids=["file alone", "bound alone", "method alone", "missing", "bound", "no number"],
)
def test_wrong_flags_are_one_line(flags: dict[str, Any], line: str) -> None:
    with pytest.raises(ExpertPolicyError) as refusal:
        read(**flags)
    assert str(refusal.value) == line


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> Any:
    """Call it with what differs from a server that is served, and with a table's origin."""

    def run(origin: dict[str, Any] | None = None, vocabulary: int = 66, text: Any = None, **differences: Any) -> None:
        usual = {"dp_size": 2, "attn_dp_size": 1, "enable_dp_attention": False, "nnodes": 1}
        config = {**usual, "disaggregation_mode": "null", "grpc_port": None, **differences}
        server_args = SimpleNamespace(**config, model_path=str(tiny_model), expert_affinity="FILE")
        whole = SimpleNamespace(vocab_size=vocabulary, model_type="qwen3_moe", **(text or {}))
        model = SimpleNamespace(hf_config=whole, hf_text_config=whole)
        monkeypatch.setattr(affinity, "resolved", lambda args: args)
        monkeypatch.setattr(affinity, "is_switched_on", lambda name: config.get(name, False))
        monkeypatch.setattr(affinity, "model_config", lambda args: model)
        table = replace(make_table(), origin=replace(ORIGIN, **(origin or {})))
        check_affinity(server_args, affinity.AffinityArguments(table, 1.1, 2))

    return run


def test_what_fits_is_served(check: Any, tiny_model: Path) -> None:
    check()
    check({"tokenizer": hash_tokenizer(tiny_model)})


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
def test_a_table_of_the_models_own_layers_and_experts_is_served(check: Any, text: dict[str, Any]) -> None:
    check(text=text)


@pytest.mark.parametrize(
    ("differences", "said"),
    [
        ({"dp_size": 1}, f"{METHOD} with --dp-size 1: allowed are at least 2 replicas"),
        ({"enable_dp_attention": True}, f"{METHOD} with data-parallel attention: "),
        ({"attn_dp_size": 2}, f"{METHOD} with data-parallel attention: "),
        ({"nnodes": 2}, f"{METHOD} with --nnodes 2: allowed is one machine"),
        ({"disaggregation_mode": "decode"}, f"{METHOD} with --disaggregation-mode decode: allowed is null"),
        ({"grpc_mode": True}, f"{METHOD} with --grpc-mode: nothing tells"),
        ({"grpc_port": 30001}, f"{METHOD} with --grpc-port 30001: nothing tells"),
        ({"SGLANG_RUST_SERVER": True}, f"{METHOD} with SGLANG_RUST_SERVER=on: nothing tells"),
        ({"vocabulary": 67}, "--expert-affinity FILE: its vocabulary is 66, that of "),
        ({"origin": {"model": "mixtral"}}, "--expert-affinity FILE: its model type is mixtral, that of "),
        ({"origin": {"tokenizer": "ab" * 32}}, "--expert-affinity FILE: its tokenizer is abababababab, that of "),
        ({"text": {"num_experts": 128}}, "--expert-affinity FILE: its number of experts is 64, that of "),
        ({"text": {"num_hidden_layers": 3}}, "--expert-affinity FILE: its number of MoE layers is 4, that of "),
        (
            {"text": {"num_hidden_layers": 6, "mlp_only_layers": [0]}},
            "--expert-affinity FILE: its number of MoE layers is 4, that of ",
        ),
        (
            {"text": {"num_hidden_layers": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1}},
            "--expert-affinity FILE: its number of MoE layers is 4, that of ",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_dispatched_is_refused_in_one_line(check: Any, differences: dict[str, Any], said: str) -> None:
    with pytest.raises(ExpertPolicyError) as refusal:
        check(**differences)
    assert str(refusal.value).startswith(said)
    assert "allowed is" in str(refusal.value) or "allowed are" in str(refusal.value)
    assert "\n" not in str(refusal.value)
