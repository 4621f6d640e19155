"""What the stage reads from a model's configuration, and the models it refuses or warns of."""

import json
from types import SimpleNamespace

import pytest

from compatibility.configured import model, server
from refused import refused, refused_unless
from sglang_xshare.compatibility import checks, modes
from sglang_xshare.compatibility.moe_model import TEXT_CONFIGS, read_folder, read_model
from sglang_xshare.compatibility.schedule import check_rows, check_schedule
from sglang_xshare.policies import VANILLA, build_plan
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.refusal import ExpertPolicyError


def test_experts_and_top_k_are_read_by_their_many_names():
    for text_config, found in (
        ({"num_experts": 128, "num_experts_per_tok": 8}, (128, 8)),
        ({"n_routed_experts": 256, "num_experts_per_tok": 8}, (256, 8)),  # DeepSeek-V3
        ({"num_local_experts": 128, "num_experts_per_tok": 4}, (128, 4)),  # gpt-oss
        ({"num_experts": 64, "moe_topk": [8, 8]}, (64, 8)),  # HunYuan
        ({"moe_num_experts": 48, "moe_top_k": 3}, (48, 3)),  # Step-3
        ({"num_experts": 128, "top_k_experts": 8}, (128, 8)),  # Gemma 4
        ({"ffn_config": SimpleNamespace(moe_num_experts=16, moe_top_k=4)}, (16, 4)),  # DBRX
    ):
        read = read_model(model("MadeUpForCausalLM", **text_config), "path")
        assert (read.num_experts, read.top_k) == found


LARGE = 10_000
# Layers, experts and top-k of what is served, and of what is not.
SHAPES: dict[bool, list[tuple[object, object, object]]] = {
    True: [(1, 2, 1), (LARGE, LARGE, LARGE)],
    False: [
        *[(0, 2, 1), (1, 1, 1), (1, 2, 0), ("1", 2, 1), (LARGE + 1, 2, 1), (1, LARGE + 1, 1), (1, 2, 3)],
        *[(2, [16, 32], 8), (2, 16, [8, 4])],  # layers that differ
    ],
}


@pytest.mark.parametrize(("served", "shape"), [(key, shape) for key in SHAPES for shape in SHAPES[key]], ids=str)
def test_the_smallest_and_the_largest_model_are_served(served, shape):
    layers, experts, top_k = shape
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
        ({}, None),
        ({"norm_topk_prob": False}, {}),
        ({"norm_topk_prob": False}, {"expert_policy": None, "mask_padding_experts": True}),
        ({"scoring_func": "sigmoid"}, {}),
        ({}, {"expert_policy": "oea", "expert_policy_config": {"kmax": 6}}),
    ],
)
def test_a_runner_that_ranks_logits_is_known_from_the_configuration(loaded, changes, check):
    """As argument resolution chooses it for gpt-oss on Hopper."""
    loaded = model("GptOssForCausalLM", num_local_experts=32, num_experts_per_tok=4, **loaded)
    with refused_unless(changes is None, "--moe-runner-backend triton_kernel"):
        check(loaded, moe_runner_backend="triton_kernel", **changes or {})
    check(loaded, **changes or {})


QWEN3 = {"num_experts": 64, "num_experts_per_tok": 8}
LOADED = model("Qwen3MoeForCausalLM", **QWEN3)
KMAX = {"expert_policy": "oea", "expert_policy_config": {"kmax": 10}}


def test_a_runner_that_nobody_gave_is_not_named(check, monkeypatch):
    """As deep_gemm, which SGLang chooses for MiniMax-M3's mxfp8, and beside which nothing runs these."""
    monkeypatch.setattr(checks, "is_given", lambda server_args: False)
    monkeypatch.setattr(checks, "check_experts", lambda server_args: None)
    with refused("--expert-policy oea"):
        check(model("MiniMaxM3SparseForCausalLM", **QWEN3), moe_runner_backend="deep_gemm", **KMAX)


def test_a_model_that_nobody_followed_is_served_without_a_dispatcher(check):
    loaded = model("MixtralForCausalLM", **QWEN3)
    check(loaded)
    with refused("--model-path path"):
        check(loaded, moe_a2a_backend="deepep")


@pytest.mark.parametrize(("policy", "served"), [("observe", False), ("xshare", True), (None, True)])
def test_only_observe_needs_whole_logits(policy, served, check, monkeypatch):
    for parts in (False, True):
        monkeypatch.setattr(modes, "hands_parts", lambda parts=parts: parts)
        with refused_unless(served or not parts, "--expert-policy observe"):
            check(LOADED, expert_policy=policy, mask_padding_experts=policy is None)


@pytest.mark.parametrize("flag", ["enable_return_routed_experts", "enable_paged_experts"])
def test_rows_that_a_flag_could_not_read_are_refused(flag, check):
    check(LOADED, **KMAX)
    with refused(f"--{flag.replace('_', '-')} on"):
        check(LOADED, **{flag: True}, **KMAX)


SERVED = read_model(LOADED, "path")


def test_drafts_are_not_estimated_where_ranks_would_differ_or_drafts_do():
    drafts = {"speculative_algorithm": "EAGLE3", "speculative_num_draft_tokens": 4}
    keys = {"k0": 1, "add": 8, "layers": {"2": {"acceptance": "auto"}}}
    schedule = build_schedule("xshare", keys, speculative=True)
    adapting = drafts | {"speculative_adaptive": True}
    by_default, by_throughput = {"expert_policy": "xshare"}, {"expert_policy_draft_depth": "throughput"}
    for changes in (drafts, adapting | by_default, adapting | by_throughput):
        assert (changes, check_schedule(schedule, SERVED, server(**changes))[1]) == (changes, [])
    upstreams = adapting | {"expert_policy_draft_depth": "upstream"}
    for changes in (drafts | {"attn_dp_size": 2}, drafts | {"moe_a2a_backend": "deepep"}, upstreams):
        with refused("--expert-policy-config acceptance auto"):
            check_schedule(schedule, SERVED, server(**changes))


def test_a_schedule_is_checked_by_itself_as_a_live_switch_does():
    """It returns the plans, each once."""
    config = server()
    keys = {"k0": 1, "add": 8, "layers": {"2": {"add": 63}}}
    plans, warnings = check_schedule(build_schedule("xshare", keys, speculative=False), SERVED, config)
    assert plans == [build_plan("xshare", k0=1, add=8), build_plan("xshare", k0=1, add=63)]
    assert warnings == ["--expert-policy xshare: one of its plans never drops any of 64 experts, and only costs time"]
    keys["layers"]["2"]["add"] = 62
    assert check_schedule(build_schedule("xshare", keys, speculative=False), SERVED, config)[1] == []
    keys = {"plans": [f"xshare:k0=1,add={add}" for add in range(60, 70)]}
    assert check_schedule(build_schedule("observe", keys, speculative=False), SERVED, config)[1] == warnings
    assert check_schedule(None, SERVED, config) == ([VANILLA], [])
    with refused("--expert-policy oea"):
        check_schedule(build_schedule("oea", {"k0": 9}, speculative=False), SERVED, config)


def test_loaded_experts_that_are_free_without_paged_experts_are_warned_of():
    warning = "--expert-policy xshare: free_residents has no effect without --enable-paged-experts"
    for free, pages, warned in ((True, False, [warning]), (False, False, []), (True, True, [])):
        schedule = build_schedule("xshare", {"k0": 1, "add": 8, "free_residents": free}, speculative=False)
        assert check_schedule(schedule, SERVED, server(enable_paged_experts=pages))[1] == warned


def test_own_share_of_weights_that_the_model_does_not_renormalize_is_refused_by_its_configuration():
    config = server()
    schedule = build_schedule("xshare", {"add": 8, "own_share": 0.75}, speculative=False)
    check_schedule(schedule, SERVED, config)
    with refused("--expert-policy xshare"):
        check_schedule(schedule, read_model(model("OlmoeForCausalLM", **QWEN3, norm_topk_prob=False), "path"), config)


@pytest.mark.parametrize(("kmax", "fits"), [(8, True), (9, False)])
def test_rows_as_wide_as_the_models_own_are_served_with_an_all_to_all_backend(kmax, fits):
    schedule = build_schedule("oea", {"k0": 2, "kmax": kmax}, speculative=False)
    with refused_unless(fits, "--moe-a2a-backend deepep"):
        config = server(tp_size=2, ep_size=2, moe_a2a_backend="deepep")
        assert [plan.kmax for plan in check_schedule(schedule, SERVED, config)[0]] == [kmax]


@pytest.mark.parametrize(("runner", "fits"), [("auto", True), ("flashinfer_mxfp4", True), ("deep_gemm", False)])
def test_rows_of_another_width_are_served_if_a_kernel_of_the_runner_takes_them(runner, fits):
    """Two of the three kernels of flashinfer_mxfp4 do; a layer shows its kernel when it loads."""
    schedule = build_schedule("oea", {"k0": 2, "kmax": 10}, speculative=False)
    with refused_unless(fits, f"--moe-runner-backend {runner}"):
        check_schedule(schedule, SERVED, server(moe_runner_backend=runner))


def test_a_rank_alone_has_whole_requests_where_none_shares_them():
    schedule = build_schedule("xshare", {"k0": 1, "add": 0, "add_per_request": 4, "rows": "rank"}, speculative=True)
    given = {"moe_a2a_backend": "deepep", "tp_size": 4, "enable_dp_attention": True, "speculative_algorithm": "EAGLE3"}
    check_rows(schedule, server(**given, attn_dp_size=4))
    with refused("--expert-policy-config rows rank"):
        check_rows(schedule, server(**given, attn_dp_size=2))


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


def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path):
    for config, reason in (
        (None, "No such file or directory"),
        ('{"text_config": "qwen", "architectures": ["A"]}', "no num_hidden_layers"),
        ('{"num_hidden_layers": 2}', "config.json: .*architectures'?"),
        ('{"num_hidden_layers": 2, "architectures": ["Qwen3ForCausalLM"]}', "dense"),
    ):
        if config is not None:
            (tmp_path / "config.json").write_text(config)
        with pytest.raises(ExpertPolicyError, match=reason) as raised:
            read_folder(str(tmp_path))
        assert str(tmp_path) in str(raised.value)
        assert "\n" not in str(raised.value)
