"""`--expert-placement`: what it sets on every release, and what it refuses in one line."""

import json
import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compatibility.configured import HIDDEN, pack, server
from compatibility.refusals import resolve
from served.release import CPU, older_releases_take_long
from sglang_xshare.compatibility import expert_placement
from sglang_xshare.compatibility.expert_placement import check_division, check_placement, set_placement
from sglang_xshare.refusal import ExpertPolicyError

FLAG = "--expert-placement"


def make_args(folder, architecture="Qwen3MoeForCausalLM", **flags):
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    usual = {"tp_size": 4, "attn_dp_size": 1, "moe_dp_size": 1, "device": "cuda"}
    return server(model_path=str(folder), revision=None, **usual | flags)


def test_what_it_sets(tmp_path):
    for placement, flags, becomes in (
        ("shard", {}, {"attn_dp_size": 4}),
        ("shard", {"attn_dp_size": 2}, {"attn_dp_size": 2}),
        ("shard", {"dp_size": 2}, {"dp_size": 2, "attn_dp_size": 1}),
        ("shard", {"device": "cpu"}, {"attn_dp_size": 1}),
        ("shard", {"architecture": "OlmoeForCausalLM"}, {"attn_dp_size": 1}),
        ("shard", {"attn_dp_size": 2, "attn_cp_size": 2}, {"attn_dp_size": 2}),
        ("shard", {"device": "cpu", "speculative_algorithm": "NGRAM"}, {"attn_dp_size": 1}),
        ("shard", {"speculative_algorithm": "EAGLE"}, {"attn_dp_size": 4}),
        ("shard", {"speculative_algorithm": "DSPARK", "enable_dp_lm_head": True}, {"attn_dp_size": 4}),
        ("shard", {**HIDDEN, "speculative_algorithm": "DSPARK", "enable_dp_lm_head": False}, {"attn_dp_size": 4}),
        ("ep", {}, {"ep_size": 4, "attn_dp_size": 1}),
        ("ep", {"ep_size": 4, "attn_dp_size": 4}, {"ep_size": 4, "attn_dp_size": 4}),
        ("ep", {"enable_eplb": True, "ep_num_redundant_experts": 4}, {"ep_size": 4}),
        ("ep", {"moe_a2a_backend": "deepep", "speculative_algorithm": "NGRAM"}, {"ep_size": 4}),
    ):
        args = make_args(tmp_path, expert_placement=placement, **flags)
        before = dict(vars(args))
        check_division(args)  # accepts these flags
        set_placement(args)
        assert vars(args) == before | becomes


def test_before_0_5_22_replicas_share_the_name(tmp_path):
    args = make_args(tmp_path, expert_placement="shard", enable_dp_attention=False)
    del args.attn_dp_size
    set_placement(args)
    assert (args.dp_size, args.enable_dp_attention, args.ep_size) == (4, True, 1)


@pytest.mark.parametrize(("gpu", "groups"), [(True, 4), (False, 1)])
def test_a_device_that_nobody_names_is_the_machines(gpu, groups, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: gpu)
    set_placement(args := make_args(tmp_path, expert_placement="shard", device=None))
    assert args.attn_dp_size == groups


@pytest.mark.parametrize("text", [None, "{", "{}"])
def test_a_model_without_a_class_keeps_its_attention(text, tmp_path):
    """SGLang itself reports a missing or torn file."""
    args = make_args(tmp_path, expert_placement="shard", speculative_algorithm="NGRAM")
    (tmp_path / "config.json").unlink()
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    check_division(args)
    set_placement(args)
    assert args.attn_dp_size == 1


FLAGS: dict[str, dict[str, Any]] = {
    "another": {"expert_placement": "slice"},
    "one rank": {"tp_size": 1},
    "whole experts": {"ep_size": 4},
    "experts that move": {"enable_eplb": True},
    "replicas": {"ep_num_redundant_experts": 2},
    "ranks that come and go": {"elastic_ep_backend": "mooncake"},
    "experts on replicas": {"moe_dp_size": 2},
    "weights on other ranks": {"dwdp_size": 2},
    "experts in places of their own": {"init_expert_location": "places.json"},
    "all-to-all": {"moe_a2a_backend": "deepep"},
    "context parallelism": {"attn_cp_size": 2},
    "n-grams": {"speculative_algorithm": "NGRAM"},
    "a standalone draft": {"speculative_algorithm": "standalone", "enable_dp_lm_head": True},
    "a draft without its head": {"speculative_algorithm": "DFLASH", "enable_dp_lm_head": False},
    "DSPARK's draft without its head": {"speculative_algorithm": "DSPARK", "enable_dp_lm_head": False},
    "other ranks": {"expert_placement": "ep", "ep_size": 2},
    "another division": {"expert_placement": "ep", "moe_dp_size": 2},
}
CLASS = "Qwen3MoeForCausalLM"
QWEN3 = {"num_experts": 64, "moe_intermediate_size": 768, "num_attention_heads": 8}
# What a model and its ranks are, as `check` takes it.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "a dense model": ("shard", {"num_experts": 0}),
    "columns": ("shard", {"moe_intermediate_size": 770}),
    "experts": ("ep", {"num_experts": 66}),
    "experts with replicas": ("ep", {"replicas": 2}),
    "heads": ("shard", {"num_attention_heads": 6}),
    "whole experts that SGLang resolves": ("shard", {"ep": 4}),
    "slices that SGLang resolves": ("ep", {"ep": 1}),
    "columns of one layer": ("shard", {"moe_intermediate_size": [1536, 514]}),
    "columns of gpt-oss in blocks that SGLang does not fill": (
        "shard",
        {"architecture": "GptOssForCausalLM", "moe_intermediate_size": 2880, "compression_config": {"group_size": 32}},
    ),
}
GPT_OSS: dict[str, Any] = {"architecture": "GptOssForCausalLM", "num_local_experts": 32, "intermediate_size": 2880}
MXFP4: dict[str, Any] = {"quantization_config": {"quant_method": "mxfp4"}}
ROUNDED: dict[str, dict[str, Any]] = {  # of 16 ranks the last would have no column
    **{f"gpt-oss on {ranks} ranks": {"ranks": ranks} for ranks in (16, 32)},
    "slices that SGLang does not round": {"architecture": "Qwen3MoeForCausalLM"},
}
REFUSED = [*FLAGS, *MODELS, *ROUNDED]


def refuse(case: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    if case in FLAGS:
        check_division(make_args(folder, **{"expert_placement": "shard", **FLAGS[case]}))
    elif case in MODELS:
        placement, model = MODELS[case]
        check(monkeypatch, placement, **QWEN3 | model)
    else:
        check(monkeypatch, "shard", **GPT_OSS | MXFP4 | ROUNDED[case])


def check(monkeypatch, placement, ranks=4, ep=None, groups=1, architecture=CLASS, replicas=0, in_text=False, **model):
    """What comes of resolved arguments and a model's configuration, or with `in_text` its part for text."""
    ep = (ranks if placement == "ep" else 1) if ep is None else ep
    ranks = {"tp_size": ranks, "ep_size": ep, "attn_dp_size": groups, "ep_num_redundant_experts": replicas}
    text = SimpleNamespace(architectures=[architecture], **model)
    whole = SimpleNamespace(architectures=[architecture]) if in_text else text
    found = SimpleNamespace(hf_config=whole, hf_text_config=text)
    monkeypatch.setattr(expert_placement, "resolved", lambda args: args)
    monkeypatch.setattr(expert_placement, "model_config", lambda args: found)
    check_placement(server(model_path="M", expert_placement=placement, **ranks))


SLICE = "ranks holds a slice of every expert,"
TWO_WIDTHS = QWEN3 | {"moe_intermediate_size": [1536, 512, 1536]}
NO_WIDTH = QWEN3 | {"moe_intermediate_size": None, "num_attention_heads": [6, 8]}
"""Heads by layer are not checked."""


@pytest.mark.parametrize(
    ("placement", "model", "said"),
    [
        ("shard", QWEN3 | {"groups": 4, "num_attention_heads": 6}, f"shard: each of 4 {SLICE} 192 of its 768 columns"),
        ("ep", QWEN3, "ep: each of 4 ranks holds 16 whole experts; "),
        ("ep", QWEN3 | {"num_experts": 66, "replicas": 2}, "ep: each of 4 ranks holds 17 whole experts; "),
        ("shard", QWEN3 | {"moe_intermediate_size": [768] * 8}, f"{SLICE} 192 of its 768 columns; "),
        ("shard", TWO_WIDTHS, f"{SLICE} 384 of its 1536 or 128 of its 512 columns; "),
        ("shard", NO_WIDTH, f"{SLICE} of a width that the model's configuration lacks; "),
        # SGLang rounds slices of MXFP4 up to blocks.
        ("shard", GPT_OSS, f"{SLICE} 720 of its 2880 columns; "),
        ("shard", GPT_OSS | MXFP4 | {"ranks": 3}, f"each of 3 {SLICE} 960 of its 2880 columns; "),
        ("shard", GPT_OSS | MXFP4 | {"ranks": 15}, f"each of 15 {SLICE} 192 of its 2880 columns; "),
        ("shard", GPT_OSS | MXFP4, f"{SLICE} 672 to 736 of its 2880 columns; "),
        ("shard", GPT_OSS | MXFP4 | {"ranks": 8}, f"each of 8 {SLICE} 192 to 384 of its 2880 columns; "),
    ],
)
def test_the_log_says_what_it_came_to(placement, model, said, monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        check(monkeypatch, placement, **model)
    (line,) = caplog.messages
    assert said in line
    groups = "groups" in model
    assert line.endswith("attention data-parallel in 4 groups of ranks" if groups else "attention tensor-parallel")


@pytest.mark.parametrize(
    ("quantization", "block", "fitting"),
    [
        ({"weight_block_size": [128, 128]}, 128, "2, 3, 6 ranks, or ep"),
        ({"weight_block_size": [128, 1]}, 128, "2, 3, 6 ranks, or ep"),
        ({"weight_block_size": [1, 128]}, 128, "2, 3, 6 ranks, or ep"),
        (pack(group_size=128), 128, "2, 3, 6 ranks, or ep"),
        (pack(block_structure=[128, 128]), 128, "2, 3, 6 ranks, or ep"),
        ({"quant_method": "gptq", "group_size": 128}, 128, "2, 3, 6 ranks, or ep"),
        ({"quant_method": "awq", "group_size": 256}, 256, "3 ranks, or ep"),
        ({"weight_block_size": [128, 96]}, 384, "2 ranks, or ep"),
        ({"group_size": 512}, 512, "ep"),
        (pack(group_size=64), None, None),
        (pack(group_size=-1), None, None),
        (pack(strategy="channel", group_size=None), None, None),
        ({"quant_method": "fp8", "weight_block_size": None}, None, None),
        ({"quant_method": "mxfp4"}, None, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("place", ["model", "text", "compression", "object"])
def test_no_slice_ends_within_a_block(quantization, block, fitting, place, monkeypatch):
    declared = SimpleNamespace(to_dict=lambda: quantization) if place == "object" else quantization
    model = QWEN3 | {"compression_config" if place == "compression" else "quantization_config": declared}
    with pytest.raises(ExpertPolicyError) if block else nullcontext() as refusal:
        check(monkeypatch, "shard", in_text=place == "text", **model)
    assert block is None or str(refusal.value) == (
        f"{FLAG} shard with 4 ranks: slices of 192 columns end within the blocks of {block} that weights are quantized "
        f"by; must be {fitting}"
    )


GPU = ("--device", "cuda", "--attention-backend", "triton")
SHARD = (FLAG, "shard", "--tp", "2")
RESOLVED = {
    (*SHARD, *GPU): {"tp": 2, "ep": 1, "attention": 2},
    (FLAG, "shard", "--tp", "4", "--dp", "2", "--enable-dp-attention", *GPU): {"tp": 4, "ep": 1, "attention": 2},
    SHARD: {"tp": 2, "ep": 1, "attention": 1},
    (FLAG, "ep", "--tp", "2"): {"tp": 2, "ep": 2, "attention": 1},
    (FLAG, "ep", "--tp", "2", "--dp", "2", "--enable-dp-attention"): {"tp": 2, "ep": 2, "attention": 2},
    (*SHARD, "--expert-policy", "xshare:k0=1,add=6", *GPU): {"tp": 2, "ep": 1, "attention": 2},
    (*SHARD, "--expert-policy", "xshare:k0=1,target_per_rank=5"): "--expert-policy xshare: target_per_rank = 5: ",
    (FLAG, "shard", "--tp", "4", "--attn-cp-size", "2", *GPU): f"{FLAG} shard with --attn-cp-size 2: ",
    (*SHARD, "--speculative-algorithm", "NGRAM", *GPU): f"{FLAG} shard with --speculative-algorithm NGRAM: ",
    ("--tp", "2", "--speculative-algorithm", "NGRAM", *GPU): {"tp": 2, "ep": 1, "attention": 1},
    (FLAG, "shard"): f"{FLAG} shard with --tp-size 1: ",
}
"""What they become, or how the refusal begins."""


@older_releases_take_long
def test_what_the_releases_make_of_it(release, patched_release, tiny_model):
    answers = resolve(patched_release(release), tiny_model, [(*CPU, *arguments) for arguments in RESOLVED])
    for found, wanted in zip(answers, RESOLVED.values(), strict=True):
        if isinstance(wanted, str):
            assert (found["ours"], found["says"][: len(wanted)]) == (True, wanted)
        else:
            assert found["ranks"] == wanted
