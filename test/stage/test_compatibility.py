"""What the stage cannot serve is refused at start-up, on every release, before weights load."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_xshare.stage.compatibility import ARCHITECTURES, ExpertPolicyError, read_model
from stage.release import CPU, every_release, make_env

POLICY = ("--expert-policy", "xshare")
NO_POLICY = "cannot be served with an expert policy"


def keys(text: str) -> tuple[str, ...]:
    return (*POLICY, "--expert-policy-config", text)


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "unknown policy": (
        ("--expert-policy", "nope"),
        "--expert-policy nope: policy = 'nope': allowed is one of vanilla, pruned, dynamic-skip, xshare, oea, "
        "lynx-lat, lynx-acc, moe-spec, custom",
    ),
    "unreadable file": (
        keys("/nowhere/policy.json"),
        "--expert-policy-config /nowhere/policy.json: No such file or directory; allowed is JSON text such as "
        "'{\"k0\": 1}' or a JSON file",
    ),
    "deterministic mode": (
        (*POLICY, "--enable-deterministic-inference"),
        f"--enable-deterministic-inference on: {NO_POLICY}: batch-aware routing is not batch-invariant; allowed is off",
    ),
    "torch.compile": (
        (*POLICY, "--enable-torch-compile"),
        f"--enable-torch-compile on: {NO_POLICY}: a compiled TopK does not call the stage; allowed is off",
    ),
    "two-batch overlap": (
        (*POLICY, "--enable-two-batch-overlap"),
        f"--enable-two-batch-overlap on: {NO_POLICY}: the router sees half a batch; allowed is off",
    ),
    "single-batch overlap": (
        (*POLICY, "--enable-single-batch-overlap"),
        f"--enable-single-batch-overlap on: {NO_POLICY}: the router sees part of a batch; allowed is off",
    ),
    "PD multiplexing": (
        (*POLICY, "--enable-pdmux"),
        f"--enable-pdmux on: {NO_POLICY}: split prefill passes the stage by; allowed is off",
    ),
    "embedding model": (
        (*POLICY, "--is-embedding"),
        f"--is-embedding on: {NO_POLICY}: it never decodes; allowed is off",
    ),
    "prefill server": (
        (*POLICY, "--disaggregation-mode", "prefill"),
        f"--disaggregation-mode prefill: {NO_POLICY}: allowed is null, decode",
    ),
    "runner that routes by itself": (
        (*POLICY, "--moe-runner-backend", "flashinfer_trtllm"),
        f"--moe-runner-backend flashinfer_trtllm: {NO_POLICY}: "
        "allowed is auto, triton, triton_kernel, deep_gemm, cutlass, marlin, flashinfer_cutlass",
    ),
    "all-to-all": (
        (*POLICY, "--moe-a2a-backend", "deepep"),
        f"--moe-a2a-backend deepep: {NO_POLICY}: allowed is none",
    ),
    "ragged verify": (
        (*POLICY, "--speculative-algorithm", "DSPARK"),
        f"--speculative-algorithm DSPARK: {NO_POLICY}: allowed is EAGLE, EAGLE3, NEXTN, STANDALONE, NGRAM",
    ),
    "batches too small": (
        (*POLICY, "--max-running-requests", "1"),
        f"--max-running-requests 1: {NO_POLICY}: no batch would have min_tokens = 2 rows; allowed is at least that",
    ),
    "warm-up beyond the model's top-k": (
        keys('{"k0": 9}'),
        "--expert-policy xshare: k0 = 9: allowed is at most the model's top-k, 8",
    ),
    "target_per_rank on one rank": (
        keys('{"target_per_rank": 5}'),
        "--expert-policy xshare: target_per_rank = 5: allowed only with expert parallelism",
    ),
    "target_per_rank with moving experts": (
        (*keys('{"target_per_rank": 5}'), "--tp", "2", "--ep", "2", "--enable-eplb"),
        f"--enable-eplb / --init-expert-location set: {NO_POLICY}: target_per_rank needs a fixed placement",
    ),
    "rows of another width than their reader's": (
        ("--expert-policy", "oea", "--expert-policy-config", '{"kmax": 10}', "--enable-return-routed-experts"),
        f"--enable-return-routed-experts on: {NO_POLICY}: kmax = 10 gives it rows of another width; allowed is off",
    ),
    "layer beyond the model's": (
        keys('{"layers": {"4": {"k0": 2}}}'),
        "--expert-policy xshare: layers 4: the model's layers are 0 to 3",
    ),
    "verify without speculation": (
        keys('{"phases": ["verify"]}'),
        '--expert-policy xshare --expert-policy-config {"phases": ["verify"]}: phases = [\'verify\']: '
        'only speculative decoding verifies; allowed here is ["decode"]',
    ),
    "masking alone in deterministic mode": (
        ("--mask-padding-experts", "--enable-deterministic-inference"),
        f"--enable-deterministic-inference on: {NO_POLICY}: batch-aware routing is not batch-invariant; allowed is off",
    ),
}
ACCEPTED: dict[str, tuple[str, ...]] = {
    "no policy": (),
    "vanilla": ("--expert-policy", "vanilla"),
    "bare xshare": POLICY,
    "masking alone": ("--mask-padding-experts",),
    "speculation": (*POLICY, "--speculative-algorithm", "NGRAM"),
    "target_per_rank with expert parallelism": (*keys('{"target_per_rank": 5}'), "--tp", "2", "--ep", "2"),
    "a plan that drops nothing, which is a warning": keys('{"add": 64}'),
    "triton": (*POLICY, "--moe-runner-backend", "triton"),
}
DP_ATTENTION = {
    "0.5.17": (("--tp", "2", "--dp", "2", "--enable-dp-attention"), "--enable-dp-attention on", "off"),
    "0.5.21": (("--tp", "2", "--dp", "2", "--enable-dp-attention"), "--enable-dp-attention on", "off"),
    "0.5.23": (("--tp", "2", "--attn-dp-size", "2"), "--attn-dp-size 2", "1"),
}


@cache
def ask(tree: Path, model: Path) -> dict[tuple[str, ...], dict[str, object] | None]:
    """What stops a server, by its arguments: all of the above in one process."""
    asked = [arguments for arguments, _ in REFUSED.values()] + list(ACCEPTED.values())
    asked += [(*POLICY, *arguments) for arguments, _, _ in DP_ATTENTION.values()]
    lines = [["--model-path", str(model), *CPU, *arguments] for arguments in asked]
    script = Path(__file__).with_name("attempts.py")
    done = subprocess.run(
        [sys.executable, script], input=json.dumps(lines), env=make_env(tree), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "null"))]
    return dict(zip(asked, answers, strict=True))


@every_release
@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_one_exact_line(case, release, patched_release, tiny_model):
    arguments, line = REFUSED[case]
    assert ask(patched_release(release), tiny_model)[arguments] == {"ours": True, "says": line}


@every_release
@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(case, release, patched_release, tiny_model):
    assert ask(patched_release(release), tiny_model)[ACCEPTED[case]] is None


@every_release
def test_dp_attention_is_refused_however_the_release_spells_it(release, patched_release, tiny_model):
    arguments, flag, allowed = DP_ATTENTION[release]
    line = f"{flag}: {NO_POLICY}: the router sees the rows of several ranks; allowed is {allowed}"
    answer = ask(patched_release(release), tiny_model)[(*POLICY, *arguments)]
    assert answer == {"ours": True, "says": line}


def model(architecture: str, **text_config: object) -> SimpleNamespace:
    return SimpleNamespace(
        hf_config=SimpleNamespace(architectures=[architecture]), hf_text_config=SimpleNamespace(**text_config)
    )


@pytest.mark.parametrize(
    ("architecture", "text_config", "found"),
    [
        ("Qwen3MoeForCausalLM", {"num_experts": 128, "num_experts_per_tok": 8}, (128, 8)),
        ("DeepseekV3ForCausalLM", {"n_routed_experts": 256, "num_experts_per_tok": 8}, (256, 8)),
        ("GptOssForCausalLM", {"num_local_experts": 128, "num_experts_per_tok": 4}, (128, 4)),
        ("MixtralForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 2}, (8, 2)),
    ],
)
def test_experts_and_top_k_are_read_by_their_many_names(architecture, text_config, found):
    assert read_model(model(architecture, **text_config), "path") == found


@pytest.mark.parametrize(
    ("architecture", "text_config"),
    [("Qwen3ForCausalLM", {"hidden_size": 128}), ("DeepseekV2ForCausalLM", {"n_routed_experts": None})],
)
def test_dense_model_is_refused(architecture, text_config):
    line = f"^--model-path path: {NO_POLICY}: {architecture} is a dense model; allowed are Mixture-of-Experts models$"
    with pytest.raises(ExpertPolicyError, match=line):
        read_model(model(architecture, **text_config), "path")


@pytest.mark.parametrize("architecture", ["Llama4ForConditionalGeneration", "Ernie4_5_MoeForCausalLM"])
def test_unknown_router_is_refused(architecture):
    with pytest.raises(ExpertPolicyError) as raised:
        read_model(model(architecture, num_experts=16, num_experts_per_tok=1), "path")
    allowed = ", ".join(sorted(ARCHITECTURES))
    assert str(raised.value) == (
        f"--model-path path: {NO_POLICY}: the router of {architecture} is not supported; allowed are {allowed}"
    )


@every_release
def test_every_supported_architecture_is_the_releases(release, pristine_release):
    models = pristine_release(release) / "sglang" / "srt" / "models"
    source = "\n".join(file.read_text() for file in models.glob("*.py"))
    assert [name for name in sorted(ARCHITECTURES) if f"class {name}" not in source] == []
