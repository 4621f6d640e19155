"""What the stage cannot serve is refused at start-up, on every release, before weights load."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmark.serving.server import ROOT
from sglang_xshare.stage.compatibility import ARCHITECTURES, ExpertPolicyError, read_model

RELEASES = ("0.5.17", "0.5.21", "0.5.23")
CPU = ("--device", "cpu", "--attention-backend", "torch_native")
POLICY = ("--expert-policy", "xshare")
NO_POLICY = "cannot be served with an expert policy"


def environment(tree: Path) -> dict[str, str]:
    own = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return os.environ | own | {"PYTHONPATH": f"{tree}:{ROOT / 'python'}"}


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
        "allowed is auto, triton, deep_gemm, cutlass, marlin, flashinfer_cutlass",
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
        [sys.executable, script], input=json.dumps(lines), env=environment(tree), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "null"))]
    return dict(zip(asked, answers, strict=True))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_one_exact_line(case, release, patched_release, tiny_model):
    arguments, line = REFUSED[case]
    assert ask(patched_release(release), tiny_model)[arguments] == {"ours": True, "says": line}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(case, release, patched_release, tiny_model):
    assert ask(patched_release(release), tiny_model)[ACCEPTED[case]] is None


@pytest.mark.parametrize("release", RELEASES)
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


@pytest.mark.parametrize("release", RELEASES)
def test_every_supported_architecture_is_the_releases(release, pristine_release):
    models = pristine_release(release) / "sglang" / "srt" / "models"
    source = "\n".join(file.read_text() for file in models.glob("*.py"))
    assert [name for name in sorted(ARCHITECTURES) if f"class {name}" not in source] == []


ENGINE = """
import sys
import sglang
if __name__ == "__main__":
    try:
        sglang.Engine(model_path=sys.argv[1], device="cpu", attention_backend="torch_native", expert_policy="nope")
    except ValueError as error:
        print(error)
    sglang.Engine(model_path=sys.argv[1], device="cpu", attention_backend="torch_native", expert_policy="nope")
"""


@pytest.mark.parametrize(
    "release", [pytest.param(r, marks=[] if r == "0.5.23" else pytest.mark.long) for r in RELEASES]
)
def test_every_way_to_start_says_one_line_and_exits_with_1(release, patched_release, tiny_model, tmp_path):
    line = REFUSED["unknown policy"][1]
    flags = ["--model-path", str(tiny_model), *CPU, "--expert-policy", "nope"]
    (tmp_path / "engine.py").write_text(ENGINE)
    commands = {
        "python -m sglang.launch_server": [sys.executable, "-m", "sglang.launch_server", *flags],
        "sglang serve": [str(Path(sys.executable).with_name("sglang")), "serve", *flags],
        "Engine": [sys.executable, str(tmp_path / "engine.py"), str(tiny_model)],
    }
    env = environment(patched_release(release))
    running = {
        name: subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name, command in commands.items()
    }
    for name, process in running.items():
        printed, said = process.communicate(timeout=200)
        assert process.returncode == 1, f"{name} exits with {process.returncode}: {said}"
        assert said.splitlines().count(line) == 1, f"{name}: {said}"
        assert said.count("expert-policy") == 1, f"{name} says more than one line about it: {said}"
        assert "Traceback" not in said, name
        assert "Load weight" not in said + printed, name
        assert (line in printed) == (name == "Engine"), f"{name} raises a ValueError"


CHECK = """
from types import SimpleNamespace
from sglang_xshare import stage
stage.check_flags(SimpleNamespace(expert_policy="xshare", speculative_algorithm=None, disaggregation_mode="null",
                                  moe_runner_backend="auto", moe_a2a_backend="none"))
"""


def check(tree: Path) -> str:
    """What the stage says to a policy on this tree; "" where it accepts it."""
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment(tree), capture_output=True, text=True)
    assert done.returncode == (1 if done.stderr else 0)
    return done.stderr.strip()


@pytest.fixture
def patched_copy(patched_release: Callable[[str], Path], tmp_path: Path) -> Path:
    """A patched tree to spoil: the files it shares with others are replaced, never written to."""
    shutil.copytree(patched_release("0.5.23"), tmp_path / "tree", copy_function=os.link)
    return tmp_path / "tree"


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.unlink()
    file.write_text(text.replace(old, new))


def test_tree_patched_by_another_version_of_the_queue_is_refused(patched_copy):
    assert check(patched_copy) == ""
    state = patched_copy / "sglang" / ".xshare" / "state.json"
    queue = json.loads(state.read_text())["queue"]
    replace(state, queue, "0" * 64)
    said = check(patched_copy)
    assert said.startswith(
        f"--expert-policy: SGLang 0.5.23 in {patched_copy} was patched by another version of the queue"
    )
    assert said.endswith(f"run `sglang-xshare patch apply --target {patched_copy}`")
    assert "\n" not in said


def test_tree_edited_since_is_refused(patched_copy):
    replace(patched_copy / "sglang/srt/layers/moe/topk.py", "expert_policy.route(topk_config)", "topk_config")
    said = check(patched_copy)
    assert "is edited after it was patched sglang/srt/layers/moe/topk.py; run" in said
    assert "\n" not in said


def test_unpatched_release_does_not_know_the_flag(pristine_release, tiny_model):
    """So a policy on an unpatched tree cannot be asked for."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(tiny_model), *CPU, *POLICY]
    env = environment(pristine_release("0.5.23"))
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.rstrip().endswith("error: unrecognized arguments: --expert-policy xshare")
