"""What the stage cannot serve is refused at start-up, on every release, before weights load."""

import json
from functools import cache
from pathlib import Path

import pytest

from admission.refusals import Answer, attempt
from benchmark.common.paths import ROOT
from served.release import LATEST, every_release, older_releases_take_long

POLICY = ("--expert-policy", "xshare")
NO_POLICY = "cannot be served with an expert policy"
UNSERVED_RUNNERS = {
    "flashinfer_cutedsl": "what its kernels make of an empty slot has not been followed",
    "hpc_ops": "it is not known to leave out an empty slot, or to take one expert twice",
}
LATEST_RUNNERS = "flashinfer_trtllm, flashinfer_mxfp4"
RUNNERS = "triton, marlin, cutlass, triton_kernel, deep_gemm, flashinfer_cutlass, flashinfer_trtllm_routed"
"""Allowed on every release, and on the latest alone."""


def keys(text: str) -> tuple[str, ...]:
    return (*POLICY, "--expert-policy-config", text)


def eagle3(draft: str) -> tuple[str, ...]:
    """The flags of a policy with this draft."""
    return (*POLICY, *BACKENDS, "--speculative-algorithm", "EAGLE3", *TREE, *DRAFT_PATH, draft)


# Configurations without weights, by folder, as changes to those of the small checkpoint and of its draft.
TARGET, DRAFT = ROOT / "checkpoints" / "qwen3-moe-tiny", ROOT / "checkpoints" / "qwen3-moe-tiny-eagle3"
WRITTEN: dict[str, tuple[Path, dict[str, object]]] = {
    "vocabulary": (DRAFT, {"vocab_size": 2048}),
    "head": (DRAFT, {"draft_vocab_size": 1025}),
    "width": (DRAFT, {"hidden_size": 256}),
    "target-width": (DRAFT, {"hidden_size": 256, "target_hidden_size": 64}),
    "wider": (DRAFT, {"hidden_size": 256, "target_hidden_size": 128}),
    "another-target": (TARGET, {"vocab_size": 2048}),
    "narrower": (TARGET, {"hidden_size": 64}),
    "dense": (TARGET, {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_experts": None}),
    "without-weights": (TARGET, {}),
    "not-renormalizing": (TARGET, {"norm_topk_prob": False}),
}
TREE = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
DRAFT_PATH = ("--speculative-draft-model-path",)
BACKENDS = ("--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx")
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "unknown policy": (
        ("--expert-policy", "nope"),
        "--expert-policy nope: policy = 'nope': allowed is one of vanilla, pruned, dynamic-skip, xshare, oea, "
        "lynx-lat, lynx-acc, moe-spec, custom, observe",
    ),
    "unreadable file": (
        keys("/nowhere/policy.json"),
        "--expert-policy-config /nowhere/policy.json: No such file or directory; allowed is JSON text such as "
        "'{\"k0\": 1}' or a JSON file",
    ),
    "folder without weights": (
        (*POLICY, "--model-path", "{written}/without-weights"),
        "--model-path {written}/without-weights: there are no weights in it; allowed is a folder with weights, or "
        "--load-format dummy; auto takes .safetensors, .bin, .pt, .pth, .gguf",
    ),
    "deterministic mode": (
        (*POLICY, "--enable-deterministic-inference"),
        f"--enable-deterministic-inference on: {NO_POLICY}: batch-aware routing is not batch-invariant; allowed is off",
    ),
    "torch.compile": (
        (*POLICY, "--enable-torch-compile"),
        f"--enable-torch-compile on: {NO_POLICY}: a compiled TopK does not call the stage; allowed is off",
    ),
    "sorted slots without a GPU": (
        (*POLICY, "--expert-policy-align"),
        "--expert-policy-align: --device cpu has no Triton MoE runner; allowed is cuda",
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
    **{
        f"runner {name}": (
            (*POLICY, "--moe-runner-backend", name),
            f"--moe-runner-backend {name}: {NO_POLICY}: {reason}; allowed is auto, {{runners}}",
        )
        for name, reason in UNSERVED_RUNNERS.items()
    },
    "truncation where the runner ranks logits": (
        (
            *("--expert-policy", "moe-spec", "--moe-runner-backend", "triton_kernel", "--expert-policy-config"),
            '{"budget": 16, "coverage": "truncate", "phases": ["decode"]}',
        ),
        f"--moe-runner-backend triton_kernel: {NO_POLICY}: coverage = 'truncate': a runner that ranks logits itself "
        "renormalizes; allowed is substitute or own",
    ),
    "more experts a row than a runner that counts on top-k": (
        (
            *("--expert-policy", "oea", "--moe-runner-backend", "deep_gemm", "--expert-policy-config"),
            '{"layers": {"3": {"kmax": 10}}}',
        ),
        f"--moe-runner-backend deep_gemm: {NO_POLICY}: kmax = 10: MoE runner deep_gemm uses top-k; allowed is 8",
    ),
    "more experts a row than a runner that ranks logits has": (
        (
            *("--expert-policy", "oea", "--moe-runner-backend", "triton_kernel", "--expert-policy-config"),
            '{"layers": {"3": {"kmax": 10}}}',
        ),
        f"--moe-runner-backend triton_kernel: {NO_POLICY}: kmax = 10: a runner that ranks logits itself uses top-k; "
        "allowed is 8",
    ),
    "a router that does not renormalize where the runner ranks logits": (
        (*POLICY, "--moe-runner-backend", "triton_kernel", "--model-path", "{written}/not-renormalizing"),
        f"--moe-runner-backend triton_kernel: {NO_POLICY}: a runner that ranks logits itself serves renormalizing "
        "routers only",
    ),
    "no model in the folder named": (
        (*POLICY, "--model-path", "{written}/nothing"),
        "--model-path {written}/nothing: not there; allowed is a model's folder, or a name for a hub",
    ),
    "misspelt policy with its keys": (
        ("--expert-policy", "oea:k=3"),
        "--expert-policy oea:k=3: k = 3: oea has no such key; allowed is k0, p, kmax, max_rank, target_per_rank, "
        "own_share, phases, "
        "min_tokens, max_tokens, rows, layers, by_batch; did you mean k0?",
    ),
    "dense model": (
        (*POLICY, "--model-path", "{written}/dense"),
        f"--model-path {{written}}/dense: {NO_POLICY}: Qwen3ForCausalLM is a dense model; "
        "allowed are Mixture-of-Experts models",
    ),
    "no draft": (
        (*POLICY, *BACKENDS, "--speculative-algorithm", "EAGLE3", *TREE),
        "--speculative-draft-model-path None: EAGLE3 drafts with another model; allowed is the path of one",
    ),
    "standalone draft of another vocabulary": (
        (*POLICY, *BACKENDS, "--speculative-algorithm", "STANDALONE", *TREE, *DRAFT_PATH, "{written}/another-target"),
        "--speculative-draft-model-path {written}/another-target: a vocabulary of 2048 tokens; "
        "allowed is the target's, 1024",
    ),
    "draft of another vocabulary": (
        eagle3("{written}/vocabulary"),
        "--speculative-draft-model-path {written}/vocabulary: a vocabulary of 2048 tokens; "
        "allowed is the target's, 1024",
    ),
    "draft whose head ranks more than the vocabulary": (
        eagle3("{written}/head"),
        "--speculative-draft-model-path {written}/head: draft_vocab_size = 1025; "
        "allowed is at most the target's vocabulary, 1024",
    ),
    "draft of another width": (
        eagle3("{written}/width"),
        "--speculative-draft-model-path {written}/width: hidden_size = 256; allowed is the target's hidden size, 128",
    ),
    "draft for a target of another width": (
        eagle3("{written}/target-width"),
        "--speculative-draft-model-path {written}/target-width: target_hidden_size = 64; "
        "allowed is the target's hidden size, 128",
    ),
    "all-to-all": (
        (*POLICY, "--moe-a2a-backend", "pplx"),
        f"--moe-a2a-backend pplx: {NO_POLICY}: it reads the -1 of an empty slot as expert 4294967295; allowed is none, "
        "deepep, mooncake, nixl",
    ),
    "ragged verify": (
        (*POLICY, "--speculative-algorithm", "DSPARK"),
        f"--speculative-algorithm DSPARK: {NO_POLICY}: allowed is EAGLE, EAGLE3, NEXTN, STANDALONE, NGRAM",
    ),
    "batches too small": (
        (*POLICY, "--max-running-requests", "1"),
        f"--max-running-requests 1: {NO_POLICY}: no batch would have min_tokens = 2 rows; allowed is at least that",
    ),
    "batches too large": (
        (*eagle3(str(DRAFT)), "--expert-policy-config", '{"k0": 1, "max_tokens": 3}'),
        f"--speculative-num-draft-tokens 4: {NO_POLICY}: every batch would have more than max_tokens = 3 rows; "
        "allowed is at most that",
    ),
    "trace of two replicas": (
        (*POLICY, "--dp-size", "2", "--expert-policy-trace", "/tmp/trace.jsonl"),
        f"--expert-policy-trace /tmp/trace.jsonl: {NO_POLICY}: 2 replicas would write it; allowed is one",
    ),
    "warm-up beyond the model's top-k": (
        keys('{"k0": 9}'),
        "--expert-policy xshare: k0 = 9: allowed is at most the model's top-k, 8",
    ),
    "target_per_rank on one rank": (
        keys('{"target_per_rank": 5}'),
        "--expert-policy xshare: target_per_rank = 5: allowed only with expert parallelism",
    ),
    "target_per_rank with experts on two ranks": (
        (*keys('{"target_per_rank": 5}'), "--tp", "2", "--ep", "2", "--ep-num-redundant-experts", "2"),
        f"--ep-num-redundant-experts 2: {NO_POLICY}: target_per_rank needs every expert on one rank; allowed is 0",
    ),
    "replicas of experts that move": (
        (*POLICY, *("--tp", "2", "--ep", "2", "--enable-eplb", "--ep-num-redundant-experts", "2")),
        f"--ep-num-redundant-experts 2: {NO_POLICY}: dynamic dispatch picks replicas by row, so that padding "
        "rows wake others; allowed is 0, or --ep-dispatch-algorithm static with an all-to-all backend",
    ),
    "replicas by a dispatch of one's own choice": (
        (*POLICY, "--ep-dispatch-algorithm", "dynamic", "--ep-num-redundant-experts", "2"),
        f"--ep-num-redundant-experts 2: {NO_POLICY}: dynamic dispatch picks replicas by row, so that padding "
        "rows wake others; allowed is 0, or --ep-dispatch-algorithm static with an all-to-all backend",
    ),
    "upstream's fake dispatch": (
        (*POLICY, "--ep-dispatch-algorithm", "fake"),
        f"--ep-dispatch-algorithm fake: {NO_POLICY}: it overwrites the router's logits; allowed is dynamic",
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
    "weights that are made up": (*POLICY, "--model-path", "{written}/without-weights", "--load-format", "dummy"),
    "a policy with its keys": ("--expert-policy", "xshare:k0=1,add=12", "--expert-policy-config", '{"min_tokens": 4}'),
    "masking alone": ("--mask-padding-experts",),
    "replicas that nothing dispatches to": (*POLICY, "--tp", "2", "--ep", "2", "--ep-num-redundant-experts", "2"),
    "experts that move, without replicas": (*POLICY, "--tp", "2", "--ep", "2", "--enable-eplb"),
    "speculation": (*POLICY, "--speculative-algorithm", "NGRAM"),
    "target_per_rank with expert parallelism": (*keys('{"target_per_rank": 5}'), "--tp", "2", "--ep", "2"),
    "a plan that drops nothing, which is a warning": keys('{"add": 64}'),
    "triton": (*POLICY, "--moe-runner-backend", "triton"),
    "a runner that ranks logits": (*POLICY, "--moe-runner-backend", "triton_kernel"),
    "a draft that fits": eagle3(str(DRAFT)),
    "a draft of another width that knows its target's": eagle3("{written}/wider"),
    "a standalone draft of another width": (
        (*POLICY, *BACKENDS, "--speculative-algorithm", "STANDALONE", *TREE, *DRAFT_PATH, "{written}/narrower")
    ),
}


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """The folder of the written configurations."""
    folder = tmp_path_factory.mktemp("written")
    for name, (model, changes) in WRITTEN.items():
        (folder / name).mkdir()
        config = json.loads((model / "config.json").read_text()) | changes
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


@cache
def ask(tree: Path, model: Path, written: Path) -> dict[tuple[str, ...], Answer]:
    """What stops a server, by its arguments: all of the above."""
    asked = [arguments for arguments, _ in REFUSED.values()] + list(ACCEPTED.values())
    lines = [[argument.replace("{written}", str(written)) for argument in arguments] for arguments in asked]
    return dict(zip(asked, attempt(tree, model, lines), strict=True))


@every_release
@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_one_exact_line(case, release, patched_release, tiny_model, written):
    arguments, line = REFUSED[case]
    answer = ask(patched_release(release), tiny_model, written)[arguments]
    assert answer == {"ours": True, "says": complete(line, written, release)}


def complete(line: str, written: Path, release: str) -> str:
    """A line of `REFUSED` as it is said on a release."""
    runners = f"{RUNNERS}, {LATEST_RUNNERS}" if release == LATEST else RUNNERS
    return line.replace("{written}", str(written)).replace("{runners}", runners)


@older_releases_take_long
@pytest.mark.parametrize("runner", LATEST_RUNNERS.split(", "))
def test_runners_that_route_themselves_before_they_could_be_handed_ids(runner, release, patched_release, tiny_model):
    (answer,) = attempt(patched_release(release), tiny_model, [(*POLICY, "--moe-runner-backend", runner)])
    reason = f"it is served from SGLang {LATEST} on; allowed is auto, {RUNNERS}"
    line = f"--moe-runner-backend {runner}: {NO_POLICY}: {reason}"
    assert answer == (None if release == LATEST else {"ours": True, "says": line})


@every_release
@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(case, release, patched_release, tiny_model, written):
    assert ask(patched_release(release), tiny_model, written)[ACCEPTED[case]] is None
