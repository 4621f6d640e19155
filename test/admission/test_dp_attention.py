"""What data-parallel attention is served with, and what is refused beside it, on every release."""

import json
from functools import cache
from pathlib import Path

import pytest

from admission.refusals import Answer, attempt
from benchmark.common.paths import ROOT
from served.eagle import eagle
from served.release import older_releases_take_long

POLICY = ("--expert-policy", "xshare")
NO_POLICY = "cannot be served with an expert policy"
SPECULATION = eagle(ROOT / "checkpoints" / "qwen3-moe-tiny", (2, 3, 6))
DP_ATTENTION = {
    "0.5.17": ("--tp", "4", "--dp", "2", "--enable-dp-attention"),
    "0.5.21": ("--tp", "4", "--dp", "2", "--enable-dp-attention"),
    "0.5.23": ("--tp", "4", "--attn-dp-size", "2"),
}
ALL_TO_ALL = ("--moe-a2a-backend", "deepep")
WITH_DP = f"{NO_POLICY}: allowed with data-parallel attention is"
ACCEPTED: dict[str, tuple[str, ...]] = {
    "decode": (),
    "verify": SPECULATION,
    "all-to-all": ALL_TO_ALL,
    "all-to-all, verify": (*ALL_TO_ALL, *SPECULATION),
    "all-to-all, a rank's rows": (*ALL_TO_ALL, "--expert-policy-config", '{"rows": "rank"}'),
}
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "context parallelism": (("--attn-cp-size", "2"), f"--attn-cp-size 2: {WITH_DP} 1"),
    "experts on replicas": (("--moe-dp-size", "2"), f"--moe-dp-size 2: {WITH_DP} 1"),
    "dense layers of their own": (("--moe-dense-tp-size", "1"), f"--moe-dense-tp-size 1: {WITH_DP} none"),
    "weights on other ranks": (("--dwdp-size", "2"), f"--dwdp-size 2: {WITH_DP} 1"),
    "ranks that come and go": (("--elastic-ep-backend", "mooncake"), f"--elastic-ep-backend mooncake: {WITH_DP} none"),
    "requests that padding splits": (
        (*SPECULATION, "--speculative-num-draft-tokens", "3"),
        f"--speculative-num-draft-tokens 3: {NO_POLICY}: SGLang pads a rank's rows to its 2 tensor-parallel ranks, "
        "which must not split a request; allowed is a multiple of 2",
    ),
    "batches that are always larger": (
        (*SPECULATION, "--expert-policy-config", '{"k0": 1, "max_tokens": 8}'),
        f"--expert-policy-config max_tokens 8: {NO_POLICY}: most batches of 2 ranks have more rows; allowed is at "
        "least 12",
    ),
    "a model that upstream does not serve so": (
        ("--model-path", "{mixtral}"),
        f"--model-path {{mixtral}}: {NO_POLICY}: MixtralForCausalLM is not known to have data-parallel attention; "
        "allowed are DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, Glm4MoeForCausalLM, GptOssForCausalLM, "
        "MiniMaxM2ForCausalLM, Qwen2MoeForCausalLM, Qwen3MoeForCausalLM, Qwen3NextForCausalLM",
    ),
    "all-to-all in one kernel": (
        ("--moe-a2a-backend", "megamoe"),
        f"--moe-a2a-backend megamoe: {NO_POLICY}: it dispatches, computes and combines in one kernel, and what it "
        "makes of an empty slot is not known; allowed is none, deepep, mooncake, nixl",
    ),
    "all-to-all with dense layers of their own": (
        (*ALL_TO_ALL, "--moe-dense-tp-size", "1"),
        f"--moe-dense-tp-size 1: {WITH_DP} none",
    ),
    "a rank's rows where the router sees all": (
        ("--expert-policy-config", '{"rows": "rank"}'),
        f"--expert-policy-config rows rank: {NO_POLICY}: without --moe-a2a-backend a router sees the rows of all "
        "ranks; allowed is batch",
    ),
    "a rank's rows that split requests": (
        (*ALL_TO_ALL, *SPECULATION, "--expert-policy-config", '{"rows": "rank"}'),
        f"--expert-policy-config rows rank: {NO_POLICY}: 2 ranks divide the rows of a batch, which splits requests; "
        "allowed with speculation is batch",
    ),
    "all-to-all with rows of another width": (
        (*ALL_TO_ALL, "--expert-policy", "oea", "--expert-policy-config", '{"k0": 2, "kmax": 9}'),
        f"--moe-a2a-backend deepep: {NO_POLICY}: kmax = 9 gives it rows of another width; allowed is none",
    ),
    "two-batch overlap": (
        ("--enable-two-batch-overlap",),
        f"--enable-two-batch-overlap on: {NO_POLICY}: the router sees half a batch; allowed is off",
    ),
}


@pytest.fixture(scope="session")
def mixtral(tiny_model, tmp_path_factory):
    """The folder of a configuration without weights."""
    folder = tmp_path_factory.mktemp("mixtral")
    changes = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8}
    (folder / "config.json").write_text(json.dumps(json.loads((tiny_model / "config.json").read_text()) | changes))
    return str(folder)


@cache
def ask(tree: Path, model: Path, mixtral: str, release: str) -> dict[tuple[str, ...], Answer]:
    """What stops a server with data-parallel attention, by its other arguments."""
    asked: list[tuple[str, ...]] = [*ACCEPTED.values(), *(arguments for arguments, _ in REFUSED.values())]
    given = [[argument.replace("{mixtral}", mixtral) for argument in arguments] for arguments in asked]
    lines = [(*POLICY, *DP_ATTENTION[release], *arguments) for arguments in given]
    return dict(zip(asked, attempt(tree, model, lines), strict=True))


@older_releases_take_long
@pytest.mark.parametrize("arguments", ACCEPTED.values(), ids=ACCEPTED)
def test_dp_attention_is_accepted_however_the_release_spells_it(
    arguments, release, patched_release, tiny_model, mixtral
):
    assert ask(patched_release(release), tiny_model, mixtral, release)[arguments] is None


@older_releases_take_long
@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_one_exact_line(case, release, patched_release, tiny_model, mixtral):
    arguments, line = REFUSED[case]
    said = ask(patched_release(release), tiny_model, mixtral, release)[arguments]
    assert said == {"ours": True, "says": line.replace("{mixtral}", mixtral)}
