"""What data-parallel attention is served with, and what is refused beside it, on every release."""

import json
from functools import cache
from pathlib import Path

import pytest

from benchmark.common.paths import ROOT
from compatibility.refusals import LINES, Answer, attempt, line_of
from served.eagle import eagle
from served.release import LATEST, older_releases_take_long

POLICY = ("--expert-policy", "xshare")
SPECULATION = eagle(ROOT / "checkpoints" / "qwen3-moe-tiny", (2, 3, 6))
DP_ATTENTION = {
    "0.5.17": ("--tp", "4", "--dp", "2", "--enable-dp-attention"),
    "0.5.21": ("--tp", "4", "--dp", "2", "--enable-dp-attention"),
    "0.5.23": ("--tp", "4", "--attn-dp-size", "2"),
}
ALL_TO_ALL = ("--moe-a2a-backend", "deepep")
ACCEPTED: dict[str, tuple[str, ...]] = {
    "decode": (),
    "verify": SPECULATION,
    "all-to-all": ALL_TO_ALL,
    "all-to-all, verify": (*ALL_TO_ALL, *SPECULATION),
    "all-to-all, a rank's rows": (*ALL_TO_ALL, "--expert-policy-config", '{"rows": "rank"}'),
}
REFUSED: dict[str, tuple[str, ...]] = {
    "context parallelism": ("--attn-cp-size", "2"),
    "experts on replicas": ("--moe-dp-size", "2"),
    "dense layers of their own": ("--moe-dense-tp-size", "1"),
    "weights on other ranks": ("--dwdp-size", "2"),
    "ranks that come and go": ("--elastic-ep-backend", "mooncake"),
    "requests that padding splits": (*SPECULATION, "--speculative-num-draft-tokens", "3"),
    "a model that upstream does not serve so": ("--model-path", "{mixtral}"),
    "all-to-all in one kernel": ("--moe-a2a-backend", "megamoe"),
    "all-to-all with dense layers of their own": (*ALL_TO_ALL, "--moe-dense-tp-size", "1"),
    "a rank's rows where the router sees all": ("--expert-policy-config", '{"rows": "rank"}'),
    "a rank's rows that split requests": (*ALL_TO_ALL, *SPECULATION, "--expert-policy-config", '{"rows": "rank"}'),
    "all-to-all with rows of another width": (
        *ALL_TO_ALL,
        "--expert-policy",
        "oea",
        "--expert-policy-config",
        '{"k0": 2, "kmax": 9}',
    ),
    "two-batch overlap": ("--enable-two-batch-overlap",),
}


@pytest.fixture(scope="session")
def mixtral(tiny_model, tmp_path_factory):
    """The folder of a configuration without weights."""
    return write_mixtral(tiny_model, tmp_path_factory.mktemp("mixtral"))


def write_mixtral(tiny_model: Path, folder: Path) -> str:
    changes = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8}
    (folder / "config.json").write_text(json.dumps(json.loads((tiny_model / "config.json").read_text()) | changes))
    return str(folder)


@cache
def ask(tree: Path, model: Path, mixtral: str, release: str) -> dict[tuple[str, ...], Answer]:
    """What stops a server with data-parallel attention, by its other arguments."""
    asked: list[tuple[str, ...]] = [*ACCEPTED.values(), *REFUSED.values()]
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
    said = ask(patched_release(release), tiny_model, mixtral, release)[REFUSED[case]]
    assert said == {"ours": True, "says": LINES["data-parallel attention"][case].replace("{mixtral}", mixtral)}


def tell(tree: Path, model: Path, folder: Path) -> dict[str, str]:
    """The line of each case, for `refusals.json`."""
    answers = ask(tree, model, write_mixtral(model, folder), LATEST)
    return {case: line_of(answers[REFUSED[case]]).replace(str(folder), "{mixtral}") for case in REFUSED}
