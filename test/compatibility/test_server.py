"""What the stage cannot serve is refused at start-up, on every release, before weights load."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmark.common.paths import ROOT
from compatibility.configured import write_configs
from compatibility.refusals import LINES, attempt
from served.eagle import eagle
from served.release import LATEST, older_releases_take_long

POLICY = ("--expert-policy", "xshare")
LATEST_RUNNERS = "flashinfer_trtllm, flashinfer_mxfp4"
"""Allowed on the latest release alone."""


def keys(text: str, policy: str = "xshare") -> tuple[str, ...]:
    return ("--expert-policy", policy, "--expert-policy-config", text)


def change(model: Path, **changes: object) -> dict[str, object]:
    """The configuration of a checkpoint with these changes."""
    return json.loads((model / "config.json").read_text()) | changes


def eagle3(draft: str) -> tuple[str, ...]:
    """The flags of a policy with this draft."""
    return (*POLICY, *BACKENDS, "--speculative-algorithm", "EAGLE3", *TREE, *DRAFT_PATH, draft)


# Configurations without weights, by folder: those of the small checkpoint and of its draft, changed.
TARGET, DRAFT = ROOT / "checkpoints" / "qwen3-moe-tiny", ROOT / "checkpoints" / "qwen3-moe-tiny-eagle3"
WRITTEN = {
    "wider": change(DRAFT, hidden_size=256, target_hidden_size=128),
    "narrower": change(TARGET, hidden_size=64),
    "dense": change(TARGET, architectures=["Qwen3ForCausalLM"], model_type="qwen3", num_experts=None),
    "without-weights": change(TARGET),
    "not-renormalizing": change(TARGET, norm_topk_prob=False),
    "mixtral": change(TARGET, architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=8),
}
TREE = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
DRAFT_PATH = ("--speculative-draft-model-path",)
BACKENDS = ("--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx")
RANKS_LOGITS = ("--moe-runner-backend", "triton_kernel")
TWO_RANKS, REPLICAS = ("--tp", "2", "--ep", "2"), ("--ep-num-redundant-experts", "2")
WIDER = keys('{"layers": {"3": {"kmax": 10}}}', "oea")
TRUNCATE = keys('{"budget": 16, "coverage": "truncate", "phases": ["decode"]}', "moe-spec")
REFUSED: dict[str, tuple[str, ...]] = {
    "unknown policy": ("--expert-policy", "nope"),
    "unreadable file": keys("/nowhere/policy.json"),
    "deterministic mode": (*POLICY, "--enable-deterministic-inference"),
    "torch.compile": (*POLICY, "--enable-torch-compile"),
    "two-batch overlap": (*POLICY, "--enable-two-batch-overlap"),
    "single-batch overlap": (*POLICY, "--enable-single-batch-overlap"),
    "PD multiplexing": (*POLICY, "--enable-pdmux"),
    "embedding model": (*POLICY, "--is-embedding"),
    "prefill server": (*POLICY, "--disaggregation-mode", "prefill"),
    **{f"runner {name}": (*POLICY, "--moe-runner-backend", name) for name in ("flashinfer_cutedsl", "hpc_ops")},
    "truncation where the runner ranks logits": (*RANKS_LOGITS, *TRUNCATE),
    "more experts a row than a runner that counts on top-k": (*WIDER, "--moe-runner-backend", "deep_gemm"),
    "more experts a row than a runner that ranks logits has": (*WIDER, *RANKS_LOGITS),
    "a router that does not renormalize where the runner ranks logits": (
        *(*POLICY, *RANKS_LOGITS, "--model-path", "{written}/not-renormalizing"),
    ),
    "misspelt policy with its keys": ("--expert-policy", "oea:k=3"),
    "dense model": (*POLICY, "--model-path", "{written}/dense"),
    "all-to-all": (*POLICY, "--moe-a2a-backend", "pplx"),
    "batches too small": (*POLICY, "--max-running-requests", "1"),
    "batches too large": (*eagle3(str(DRAFT)), "--expert-policy-config", '{"k0": 1, "max_rows": 3}'),
    "trace of two replicas": (*POLICY, "--dp-size", "2", "--expert-policy-trace", "/tmp/trace.jsonl"),
    "a pipeline": (*POLICY, "--pp-size", "2"),
    "warm-up beyond the model's top-k": keys('{"k0": 9}'),
    "target_per_rank on one rank": keys('{"target_per_rank": 5}'),
    "target_per_rank with experts on two ranks": (*keys('{"target_per_rank": 5}'), *TWO_RANKS, *REPLICAS),
    "replicas of experts that move": (*POLICY, *TWO_RANKS, "--enable-eplb", *REPLICAS),
    "replicas by a dispatch of one's own choice": (*POLICY, "--ep-dispatch-algorithm", "dynamic", *REPLICAS),
    "upstream's fake dispatch": (*POLICY, "--ep-dispatch-algorithm", "fake"),
    "rows of another width than their reader's": (*keys('{"kmax": 10}', "oea"), "--enable-return-routed-experts"),
    "layer beyond the model's": keys('{"layers": {"4": {"k0": 2}}}'),
    "verify without speculation": keys('{"phases": ["verify"]}'),
    "masking alone in deterministic mode": ("--mask-padding-experts", "--enable-deterministic-inference"),
}
ACCEPTED: dict[str, tuple[str, ...]] = {
    "no policy": (),
    "vanilla": ("--expert-policy", "vanilla"),
    "bare xshare": POLICY,
    "weights that are made up": (*POLICY, "--model-path", "{written}/without-weights", "--load-format", "dummy"),
    "a policy with its keys": ("--expert-policy", "xshare:k0=1,add=12", "--expert-policy-config", '{"min_rows": 4}'),
    "masking alone": ("--mask-padding-experts",),
    "replicas that nothing dispatches to": (*POLICY, *TWO_RANKS, *REPLICAS),
    "experts that move, without replicas": (*POLICY, *TWO_RANKS, "--enable-eplb"),
    "a pipeline without a policy": ("--expert-policy", "vanilla", "--pp-size", "2"),
    "speculation": (*POLICY, "--speculative-algorithm", "NGRAM"),
    "target_per_rank with expert parallelism": (*keys('{"target_per_rank": 5}'), *TWO_RANKS),
    "a plan that drops nothing": keys('{"add": 64}'),
    "triton": (*POLICY, "--moe-runner-backend", "triton"),
    "a runner that ranks logits": (*POLICY, *RANKS_LOGITS),
    "a draft that fits": eagle3(str(DRAFT)),
    "a draft of another width that knows its target's": eagle3("{written}/wider"),
    "a standalone draft of another width": (
        (*POLICY, *BACKENDS, "--speculative-algorithm", "STANDALONE", *TREE, *DRAFT_PATH, "{written}/narrower")
    ),
}


SPECULATION = eagle(TARGET, (2, 3, 6))
DP_ATTENTION = {
    **dict.fromkeys(("0.5.17", "0.5.21"), ("--tp", "4", "--dp", "2", "--enable-dp-attention")),
    "0.5.23": ("--tp", "4", "--attn-dp-size", "2"),
}
ALL_TO_ALL = ("--moe-a2a-backend", "deepep")
ACCEPTED_RANKS: dict[str, tuple[str, ...]] = {
    "decode": (),
    "verify": SPECULATION,
    "all-to-all": ALL_TO_ALL,
    "all-to-all, verify": (*ALL_TO_ALL, *SPECULATION),
    "all-to-all, a rank's rows": (*ALL_TO_ALL, "--expert-policy-config", '{"rows": "rank"}'),
}
REFUSED_RANKS: dict[str, tuple[str, ...]] = {
    "context parallelism": ("--attn-cp-size", "2"),
    "experts on replicas": ("--moe-dp-size", "2"),
    "dense layers of their own": ("--moe-dense-tp-size", "1"),
    "weights on other ranks": ("--dwdp-size", "2"),
    "ranks that come and go": ("--elastic-ep-backend", "mooncake"),
    "requests that padding splits": (*SPECULATION, "--speculative-num-draft-tokens", "3"),
    "a model that upstream does not serve so": ("--model-path", "{written}/mixtral"),
    "a rank's rows where the router sees all": ("--expert-policy-config", '{"rows": "rank"}'),
    "a rank's rows that split requests": (*ALL_TO_ALL, *SPECULATION, "--expert-policy-config", '{"rows": "rank"}'),
    "all-to-all with rows of another width": (*ALL_TO_ALL, *keys('{"k0": 2, "kmax": 9}', "oea")),
}
"""Further flags with which a server with data-parallel attention is refused, by case."""
# With these flags, which the latest release alone has, SGLang returns hidden states and does not speculate.
HIDDEN = ("--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3")
VERIFY_ALONE = (*HIDDEN, "--expert-policy", "moe-spec:budget=32")
DECODE = (*HIDDEN, *keys('{"phases": ["decode"], "max_rows": 3}'), "--speculative-num-draft-tokens", "4")
LISTS = {"servers": (REFUSED, ACCEPTED), "data-parallel attention": (REFUSED_RANKS, ACCEPTED_RANKS)}


def list_flags(kind: str, release: str) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Return the arguments of a list that a release refuses, and those that it serves, by case."""
    start = () if kind == "servers" else (*POLICY, *DP_ATTENTION[release])
    refused, accepted = ({case: (*start, *flags) for case, flags in cases.items()} for cases in LISTS[kind])
    return refused, accepted


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """The folder of the written configurations."""
    return write_configs(tmp_path_factory.mktemp("written"), WRITTEN)


@cache
def ask(tree: Path, model: Path, written: Path, release: str) -> dict[tuple[str, ...], Any]:
    """What stops a server, by its arguments: all of the above."""
    asked = [flags for kind in LISTS for cases in list_flags(kind, release) for flags in cases.values()]
    asked += [VERIFY_ALONE, DECODE] if release == LATEST else []
    lines = [[argument.replace("{written}", str(written)) for argument in arguments] for arguments in asked]
    return dict(zip(asked, attempt(tree, model, lines), strict=True))


def tell(tree: Path, model: Path, folder: Path) -> dict[str, dict[str, str]]:
    """The line of each case, for `refusals.json`."""
    answers = ask(tree, model, write_configs(folder, WRITTEN), LATEST)
    return {
        kind: {
            case: answers[flags]["says"].replace(str(folder), "{written}")
            for case, flags in list_flags(kind, LATEST)[0].items()
        }
        for kind in LISTS
    }


@older_releases_take_long
@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind, (refused, _) in LISTS.items() for case in refused])
def test_refused_with_one_exact_line(kind, case, release, patched_release, tiny_model, written):
    answer = ask(patched_release(release), tiny_model, written, release)[list_flags(kind, release)[0][case]]
    assert answer == {"ours": True, "says": complete(case, written, release, kind)}


def complete(case: str, written: Path, release: str, kind: str = "servers") -> str:
    """The line of a refused case as it is said on a release."""
    line = LINES[kind][case].replace("{written}", str(written))
    return line if release == LATEST else line.removesuffix(f", {LATEST_RUNNERS}")


@older_releases_take_long
@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind, (_, accepted) in LISTS.items() for case in accepted])
def test_accepted(kind, case, release, patched_release, tiny_model, written):
    """Data-parallel attention too, in each release's own spelling."""
    flags = list_flags(kind, release)[1][case]
    assert ask(patched_release(release), tiny_model, written, release)[flags] is None


def test_hidden_states_alone_are_no_speculation(patched_release, tiny_model, written):
    answers = ask(patched_release(LATEST), tiny_model, written, LATEST)
    line = LINES["arguments"]["moe-spec with hidden states alone"]
    assert (answers[VERIFY_ALONE], answers[DECODE]) == ({"ours": True, "says": line}, None)
