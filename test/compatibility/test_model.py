"""What the stage reads from a model's configuration, and the models it refuses or warns of."""

import json
from types import SimpleNamespace

import pytest

from compatibility.configured import model, server
from refused import refused, refused_unless
from sglang_xshare.compatibility import checks, modes
from sglang_xshare.compatibility.moe_model import TEXT_CONFIGS, read_folder, read_model
from sglang_xshare.compatibility.schedule import check_schedule
from sglang_xshare.policies import VANILLA, build_plan
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.refusal import ExpertPolicyError


@pytest.mark.parametrize(
    ("architecture", "text_config", "found"),
    [
        ("Qwen3MoeForCausalLM", {"num_experts": 128, "num_experts_per_tok": 8}, (128, 8)),
        ("DeepseekV3ForCausalLM", {"n_routed_experts": 256, "num_experts_per_tok": 8}, (256, 8)),
        ("GptOssForCausalLM", {"num_local_experts": 128, "num_experts_per_tok": 4}, (128, 4)),
        ("MixtralForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 2}, (8, 2)),
        ("HunYuanMoEV1ForCausalLM", {"num_experts": 64, "moe_topk": [8, 8]}, (64, 8)),
        ("Step3VLForConditionalGeneration", {"moe_num_experts": 48, "moe_top_k": 3}, (48, 3)),
        ("Gemma4ForCausalLM", {"num_experts": 128, "top_k_experts": 8}, (128, 8)),
        ("DbrxForCausalLM", {"ffn_config": SimpleNamespace(moe_num_experts=16, moe_top_k=4)}, (16, 4)),
    ],
)
def test_experts_and_top_k_are_read_by_their_many_names(architecture, text_config, found):
    read = read_model(model(architecture, **text_config), "path")
    assert (read.num_experts, read.top_k) == found


@pytest.mark.parametrize(("key", "value"), [("num_experts", [16, 32]), ("num_experts_per_tok", [8, 4])])
def test_layers_that_differ_are_refused(key, value):
    given = {"num_experts": 16, "num_experts_per_tok": 8} | {key: value}
    with refused("--model-path path"):
        read_model(model("HunYuanMoEV1ForCausalLM", **given), "path")


@pytest.mark.parametrize(
    ("layers", "experts", "top_k", "served"),
    [
        *((*shape, True) for shape in ((1, 2, 1), (10_000, 10_000, 10_000))),
        *((*shape, False) for shape in ((0, 2, 1), (1, 1, 1), (1, 2, 0), ("1", 2, 1))),
        *((*shape, False) for shape in ((10_001, 2, 1), (1, 10_001, 1), (1, 2, 3))),
    ],
)
def test_the_smallest_and_the_largest_model_are_served(layers, experts, top_k, served):
    given = model("Qwen3MoeForCausalLM", num_experts=experts, num_experts_per_tok=top_k)
    given.num_hidden_layers = layers
    with refused_unless(served, "--model-path path"):
        assert read_model(given, "path").num_layers == layers


@pytest.fixture
def check(monkeypatch):
    """Call it with a loaded configuration and resolved arguments for what is said of them before weights load."""

    def check_server(loaded: SimpleNamespace, **changes: object) -> None:
        monkeypatch.setattr(checks, "model_config", lambda server_args: loaded)
        for error in checks.find_refusals(checks.Start(server(**changes)), checks.RESOLVED):
            raise error

    return check_server


@pytest.mark.parametrize(
    ("loaded", "changes"),
    [
        ({"norm_topk_prob": False}, {}),
        ({"norm_topk_prob": False}, {"expert_policy": None, "mask_padding_experts": True}),
        ({"scoring_func": "sigmoid"}, {}),
        ({}, {"expert_policy": "oea", "expert_policy_config": {"kmax": 6}}),
    ],
)
def test_a_runner_that_ranks_logits_is_known_from_the_configuration(loaded, changes, check):
    """As argument resolution chooses it for gpt-oss on Hopper."""
    loaded = model("GptOssForCausalLM", num_local_experts=32, num_experts_per_tok=4, **loaded)
    with refused("--moe-runner-backend triton_kernel"):
        check(loaded, moe_runner_backend="triton_kernel", **changes)
    check(loaded, **changes)


def test_a_runner_that_nobody_gave_is_not_named(check, monkeypatch):
    """As deep_gemm, which SGLang chooses for MiniMax-M3's mxfp8, and beside which nothing runs these."""
    monkeypatch.setattr(checks, "is_given", lambda server_args: False)
    monkeypatch.setattr(checks, "check_experts", lambda server_args: None)
    given = {"expert_policy": "oea", "expert_policy_config": {"kmax": 10}, "moe_runner_backend": "deep_gemm"}
    with refused("--expert-policy oea"):
        check(model("MiniMaxM3SparseForCausalLM", **QWEN3), **given)


def test_a_runner_that_ranks_logits_serves_gpt_oss(check):
    check(model("GptOssForCausalLM", num_local_experts=32, num_experts_per_tok=4), moe_runner_backend="triton_kernel")


QWEN3 = {"num_experts": 64, "num_experts_per_tok": 8}


def test_a_model_that_nobody_followed_is_served_without_a_dispatcher(check):
    loaded = model("MixtralForCausalLM", **QWEN3)
    check(loaded)
    with refused("--model-path path"):
        check(loaded, moe_a2a_backend="deepep")


@pytest.mark.parametrize(("policy", "served"), [("observe", False), ("xshare", True), (None, True)])
def test_only_observe_needs_whole_logits(policy, served, check, monkeypatch):
    loaded = model("Qwen3MoeForCausalLM", **QWEN3)
    for parts in (False, True):
        monkeypatch.setattr(modes, "hands_parts", lambda parts=parts: parts)
        with refused_unless(served or not parts, "--expert-policy observe"):
            check(loaded, expert_policy=policy, mask_padding_experts=policy is None)


@pytest.mark.parametrize("flag", ["enable_return_routed_experts", "enable_paged_experts"])
def test_rows_that_a_flag_could_not_read_are_refused(flag, check):
    loaded = model("Qwen3MoeForCausalLM", **QWEN3)
    given = {"expert_policy": "oea", "expert_policy_config": {"kmax": 10}}
    check(loaded, **given)
    with refused(f"--{flag.replace('_', '-')} on"):
        check(loaded, **{flag: True}, **given)


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_dp_size": 2},
        {"moe_a2a_backend": "deepep"},
        {"speculative_adaptive": True, "expert_policy_draft_depth": "upstream"},
    ],
)
def test_drafts_are_not_estimated_where_ranks_would_differ_or_drafts_do(changes):
    served = read_model(model("Qwen3MoeForCausalLM", **QWEN3), "path")
    drafts = {"speculative_algorithm": "EAGLE3", "speculative_num_draft_tokens": 4}
    keys = {"k0": 1, "add": 8, "layers": {"2": {"acceptance": "auto"}}}
    schedule = build_schedule("xshare", keys, speculative=True)
    adapting = {"speculative_adaptive": True}  # by a depth that is chosen here
    for served_too in (
        {},
        adapting | {"expert_policy": "xshare"},
        adapting | {"expert_policy_draft_depth": "throughput"},
    ):
        assert check_schedule(schedule, served, server(**drafts | served_too))[1] == []
    with refused("--expert-policy-config acceptance auto"):
        check_schedule(schedule, served, server(**drafts | changes))


def test_a_schedule_is_checked_by_itself_as_a_live_switch_does():
    """It returns the plans, each once."""
    served = read_model(model("Qwen3MoeForCausalLM", **QWEN3), "path")
    config = server()
    keys = {"k0": 1, "add": 8, "layers": {"2": {"add": 63}}}
    plans, warnings = check_schedule(build_schedule("xshare", keys, speculative=False), served, config)
    assert plans == [build_plan("xshare", k0=1, add=8), build_plan("xshare", k0=1, add=63)]
    assert warnings == ["--expert-policy xshare: one of its plans never drops any of 64 experts, and only costs time"]
    keys["layers"]["2"]["add"] = 62
    assert check_schedule(build_schedule("xshare", keys, speculative=False), served, config)[1] == []
    keys = {"plans": [f"xshare:k0=1,add={add}" for add in range(60, 70)]}
    assert check_schedule(build_schedule("observe", keys, speculative=False), served, config)[1] == warnings
    assert check_schedule(None, served, config) == ([VANILLA], [])
    with refused("--expert-policy oea"):
        check_schedule(build_schedule("oea", {"k0": 9}, speculative=False), served, config)


def test_own_share_of_weights_that_the_model_does_not_renormalize_is_refused_by_its_configuration():
    config = server()
    schedule = build_schedule("xshare", {"add": 8, "own_share": 0.75}, speculative=False)
    check_schedule(schedule, read_model(model("Qwen3MoeForCausalLM", **QWEN3), "path"), config)
    with refused("--expert-policy xshare"):
        check_schedule(schedule, read_model(model("OlmoeForCausalLM", **QWEN3, norm_topk_prob=False), "path"), config)


def test_a_folder_is_read_without_sglang(tiny_model, tmp_path):
    shape, *_ = read_folder(str(tiny_model))
    assert (shape.architecture, shape.num_layers, shape.num_experts, shape.top_k) == ("Qwen3MoeForCausalLM", 4, 64, 8)
    nested = {"architectures": ["Qwen3MoeForCausalLM"], "text_config": QWEN3 | {"num_hidden_layers": 3}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert read_folder(str(tmp_path))[0].num_layers == 3


SHAPE = QWEN3 | {"num_hidden_layers": 3}


@pytest.mark.parametrize("changes", [{}, {"rope_scaling": {"factor": 2}, "vision_config": None}])
@pytest.mark.parametrize(
    "config",
    [
        SHAPE | {"text_config": {}},
        *({name: SHAPE, "num_hidden_layers": 4} for name in TEXT_CONFIGS),
        {"thinker_config": SHAPE | {"text_config": {}}},
        {"thinker_config": {"text_config": SHAPE, "num_hidden_layers": 4}},
    ],
    ids=str,
)
def test_a_folders_language_model_is_found_beside_others(config, changes, tmp_path):
    config = config | {"architectures": ["Qwen3MoeForCausalLM"], "vision_config": {"depth": 5}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape, original, changed, _ = read_folder(str(tmp_path), changes)
    assert (shape.num_layers, shape.num_experts) == (3, 64)
    assert (original, changed) == (config, config | changes)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (None, "No such file or directory"),
        ("{", "config.json:"),
        ("[]", r"config.json must be a JSON object \(got \[\]\)"),
        ('{"text_config": "qwen", "architectures": ["A"]}', "no num_hidden_layers"),
        ('{"num_hidden_layers": 2}', "config.json: .*architectures'?"),
        ('{"num_hidden_layers": 2, "architectures": ["Qwen3ForCausalLM"]}', "dense"),
    ],
)
def test_a_folder_without_a_model_is_refused_in_one_line(config, reason, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ExpertPolicyError, match=reason) as raised:
        read_folder(str(tmp_path))
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)
