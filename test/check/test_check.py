"""`sglang-xshare check` says what a server would: the same refusals, and what SGLang resolves for another GPU."""

import json
import logging
import re
import subprocess
import sys
from functools import cache
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmark.common.paths import ROOT
from benchmark.gpu.models import COMMON, CONFIGS
from compatibility.refusals import attempt
from compatibility.test_dp_attention import DP_ATTENTION
from compatibility.test_dp_attention import REFUSED as REFUSED_RANKS
from compatibility.test_expert_placement import FLAG as PLACEMENT
from compatibility.test_expert_placement import RESOLVED as PLACEMENTS
from compatibility.test_server import (  # noqa: F401 - written is a fixture
    ACCEPTED,
    POLICY,
    REFUSED,
    complete,
    keys,
    written,
)
from scripts.runners import FP8, write_model
from served.release import CPU, LATEST, OLDER, make_env, older_releases_take_long, run_script
from sglang_xshare.check.command import _on_device
from sglang_xshare.check.flags import read_flags
from sglang_xshare.check.resolve import Resolution, _listening, _resolve
from sglang_xshare.check.table import spell_sizes
from sglang_xshare.cli import main
from sglang_xshare.gpus import GPUS

TINY = ROOT / "checkpoints" / "qwen3-moe-tiny"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
MODELS = {
    "bf16": COMMON | CONFIGS["qwen3-30b-a3b"],
    "awq": COMMON | CONFIGS["qwen3-30b-a3b"] | {"dtype": "float16", "quantization_config": AWQ},
    "gpt-oss": COMMON | CONFIGS["gpt-oss-20b"],
    "fp8": COMMON | CONFIGS["qwen3-30b-a3b"] | {"quantization_config": FP8},
    "w4afp8": COMMON | CONFIGS["qwen3-30b-a3b"] | {"quantization_config": {"quant_method": "w4afp8"}},
}
RESOLVED = {  # by model and GPU: the runner at server level, SGLang's where it is moved, the verdict
    ("bf16", "a100"): ("auto", None, "served"),
    ("bf16", "h100"): ("auto", None, "served"),
    ("bf16", "rtx5090"): ("auto", None, "does not fit"),
    ("awq", "h100"): ("auto", None, "served"),
    ("gpt-oss", "h100"): ("triton_kernel", None, "served"),
    ("fp8", "b200"): ("triton", "flashinfer_trtllm", "served"),
    ("w4afp8", "h100"): ("auto", None, "refused"),
}
UNFIT = "SGLang runs w4afp8 experts with cutlass_w4a8_moe here"
WITH_GPU = pytest.mark.parametrize("release", [pytest.param(OLDER[-1], marks=pytest.mark.long), LATEST])
"""The releases that can be told what GPU there is."""


def run_all(tree: Path, asked: list[list[str]], env: dict[str, str] | None = None) -> list[dict[str, str]]:
    """What the command says to each list of arguments, asked in one process; a variable of no text is unset."""
    own = {name: value for name, value in (make_env(tree) | (env or {})).items() if value}
    return run_script(Path(__file__).with_name("check_flags.py"), own, asked)


AFFINITY = ("--load-balance-method", "expert_affinity")
# Wrong in one part of the arguments each, as given or as resolved: any two of them say in which order they are checked.
WRONG = [
    (PLACEMENT, "shard"),
    ("--expert-policy", "nope"),
    (*POLICY, "--enable-two-batch-overlap"),
    (*POLICY, "--max-running-requests", "1"),
    (*POLICY, "--model-path", "{written}/dense"),
    (*POLICY, "--expert-policy-trace", "/tmp/trace.jsonl", "--dp-size", "2"),
    AFFINITY,
    ("--expert-affinity", "t"),
]


def list_asked(release: str) -> list[tuple[str, ...]]:
    """What may be refused beside what `test_server.py` has: of ranks, of placements, of affinity, of two parts."""
    known = [flags for flags in REFUSED_RANKS.values() if "{mixtral}" not in flags]
    ranks = [(*POLICY, *DP_ATTENTION[release], *flags) for flags in known]
    both = [(*one, *two) for one, two in combinations(WRONG, 2)]
    return [*ranks, *PLACEMENTS, *WRONG, *both]


@cache
def ask_as_servers(tree: Path, folder: Path, release: str) -> dict[tuple[str, ...], dict[str, str]]:
    """The answers to all arguments that `test_server.py` gives to servers, and to those of `list_asked`."""
    asked = [*REFUSED.values(), *ACCEPTED.values(), *list_asked(release)]
    lines = [
        ["--json", "--model-path", str(TINY), *CPU, *(word.replace("{written}", str(folder)) for word in arguments)]
        for arguments in asked
    ]
    return dict(zip(asked, run_all(tree, lines), strict=True))


@older_releases_take_long
def test_it_refuses_what_a_server_refuses_for_the_same_reason(release, patched_release, written):  # noqa: F811
    answers = ask_as_servers(patched_release(release), written, release)
    wrong = {}
    for case, arguments in REFUSED.items():
        answer = answers[arguments]
        report = json.loads(answer["out"])
        first = {"by": "sglang-xshare", "says": complete(case, written, release)}
        if (answer["code"], report["served"]) != (1, False) or report["refusals"][:1] != [first]:
            wrong[case] = report["refusals"]
    assert wrong == {}


@older_releases_take_long
def test_its_first_refusal_is_the_servers(release, patched_release, written):  # noqa: F811
    tree, asked = patched_release(release), list_asked(release)
    servers = attempt(tree, TINY, [[word.replace("{written}", str(written)) for word in flags] for flags in asked])
    answers = ask_as_servers(tree, written, release)
    wrong, refused = {}, 0
    for flags, server in zip(asked, servers, strict=True):
        found = json.loads(answers[flags]["out"])["refusals"]
        told = [{"ours": refusal["by"] == "sglang-xshare", "says": refusal["says"]} for refusal in found]
        if told[:1] != ([server] if server else []) or len({refusal["says"] for refusal in told}) < len(told):
            wrong[" ".join(flags)] = server, told
        refused += server is not None
    assert wrong == {}
    assert refused > 50, "or this compares nothing"


@older_releases_take_long
def test_it_serves_what_a_server_serves(release, patched_release, written):  # noqa: F811
    answers = ask_as_servers(patched_release(release), written, release)
    reports = {case: json.loads(answers[arguments]["out"]) for case, arguments in ACCEPTED.items()}
    assert {case: report["refusals"] for case, report in reports.items()} == {case: [] for case in ACCEPTED}
    assert {answers[arguments]["code"] for arguments in ACCEPTED.values()} == {0}
    report = reports["bare xshare"]
    assert report["model"] == {"architecture": "Qwen3MoeForCausalLM", "layers": 4, "experts": 64, "top_k": 8}
    resolved = {"k0": 1, "p": 1.0, "utility": "topk", "add": 24, "add_per_request": 0, "balance": "literal"}
    resolved["own_share"] = 0.0
    assert report["policy"] == {"policy": "xshare", "keys": resolved}
    assert report["plan"].items() >= {"policy": "xshare", **resolved, "min_rows": 2, "overrides": []}.items()
    assert (report["sglang"], report["device"], report["capture_sizes"]) == (release, "cpu", [])
    assert report["selection"] == {"vanilla": [1, 2, 3], "triton": [], "torch": list(range(4, 17))}
    assert (report["plans"], report["plans_that_can_drop"]) == (1, 1)
    useless = reports["a plan that drops nothing, which is a warning"]
    assert useless["plans_that_can_drop"] == 0
    line = (
        "--expert-policy xshare: this plan (k0 = 1, add = 64) never drops one of 64 experts; with add below 63 it can"
    )
    assert line in list_warnings(useless)
    assert reports["no policy"]["policy"] is None


def list_warnings(report: dict) -> list[str]:
    """The lines of ours, without SGLang's."""
    return [warning["says"] for warning in report["warnings"] if warning["by"] == "sglang-xshare"]


@cache
def ask_of_gpus(tree: Path, folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    """The answers for every model and GPU of `RESOLVED`."""
    return dict(zip(RESOLVED, run_all(tree, list_gpus(folder)), strict=True))


def list_gpus(folder: Path) -> list[list[str]]:
    """The arguments for every model and GPU of `RESOLVED`, of models that are written into the folder."""
    for name, config in MODELS.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    return [["--json", "--model", str(folder / model), "--gpu", gpu, *POLICY] for model, gpu in RESOLVED]


@WITH_GPU
@pytest.mark.parametrize(("model", "gpu"), RESOLVED)
def test_what_auto_becomes_on_a_gpu(model, gpu, release, patched_release, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "models"
    folder.mkdir(exist_ok=True)
    answer = ask_of_gpus(patched_release(release), folder)[model, gpu]
    report = json.loads(answer["out"])
    runner, moved, verdict = RESOLVED[model, gpu]
    lines = [line for line in list_warnings(report) if line.startswith("expert policy: ")]
    assert lines == ([f"expert policy: MoE runner {moved} (auto) -> {runner}"] if moved else [])
    assert report["moe_runner"] == runner
    assert [UNFIT in refusal["says"] for refusal in report["refusals"]] == ([True] if verdict == "refused" else [])
    assert (answer["code"], report["verdict"]) == (int(verdict != "served"), verdict)
    assert report["served"] is (verdict == "served")
    assert (report["gpu"], report["device"]) == (gpu, "cuda")
    assert set(range(1, 17)) <= set(report["capture_sizes"])
    beyond = report["model"]["top_k"] - 1  # what a row wants beyond its warm-up; 24 experts are added
    assert report["selection"]["triton"] == [size for size in report["capture_sizes"] if size * beyond > 24]
    assert report["attention"]["decode"] not in (None, "torch_native", "intel_amx")


def test_gpus_are_told_the_same_without_the_cpu_engine(patched_release, tmp_path_factory):
    """As a stranger asks: SGLang registers MXFP4 only beside a GPU or with that variable."""
    folder = tmp_path_factory.getbasetemp() / "models"
    folder.mkdir(exist_ok=True)
    tree = patched_release(LATEST)
    answers = run_all(tree, list_gpus(folder), {"SGLANG_USE_CPU_ENGINE": ""})
    assert dict(zip(RESOLVED, answers, strict=True)) == ask_of_gpus(tree, folder)


def test_another_device_is_refused_wherever_it_is_named(tmp_path):
    (tmp_path / "server.yaml").write_text("device: cpu\n")
    for flags in (["--device", "cpu"], ["--config", str(tmp_path / "server.yaml")]):
        with pytest.raises(ValueError, match="--device cpu with --gpu:"):
            _on_device(flags, read_flags(flags), GPUS["h100"])
    (tmp_path / "server.yaml").write_text("port: 3\n")
    flags = ["--config", str(tmp_path / "server.yaml")]
    assert _on_device(flags, read_flags(flags), GPUS["h100"]) == [*flags, "--device", "cuda"]


def test_the_plan_is_the_models_and_what_has_no_effect_is_warned_of(patched_release):
    """Every default resolved, the model's top-k for what stands for it, and overrides."""
    overrides = '{"k0": 3, "layers": {"0": {"policy": "vanilla"}}}'
    asked = [
        ["--json", "--model", str(TINY), *CPU, "--expert-policy", "oea", "--expert-policy-config", overrides],
        ["--model", str(TINY), *CPU, "--expert-policy", "oea", "--expert-policy-config", overrides],
        ["--json", "--model", str(TINY), *CPU, *POLICY, "--max-running-requests", "2"],
    ]
    plan, table, idle = run_all(patched_release(LATEST), asked)
    found = json.loads(plan["out"])["plan"]
    assert (found["kmax"], found["overrides"]) == (8, [{"layers": "0", "policy": "vanilla"}])
    assert '{"layers": "0", "policy": "vanilla"}' in table["out"]
    (line,) = list_warnings(json.loads(idle["out"]))
    assert line.startswith("--expert-policy xshare: add = 24: 14 hold all that 2 rows want")


def test_all_kinds_of_refusals_are_told(patched_release):
    asked = [
        *("--json", "--model", str(TINY), *CPU, "--moe-runner-backend", "hpc_ops"),
        *("--expert-policy-trace", "/tmp/trace.jsonl", "--dp-size", "2"),
        *("--max-running-requests", "1", *keys('{"k0": 9}')),
    ]
    (answer,) = run_all(patched_release(LATEST), [asked])
    says = [refusal["says"] for refusal in json.loads(answer["out"])["refusals"]]
    assert [line.split()[0].rstrip(":") for line in says] == [
        "--moe-runner-backend",
        "--expert-policy-trace",
        "--max-running-requests",
    ]


def test_the_table_says_the_same(patched_release, tmp_path):
    for name in ("fp8", "w4afp8"):
        write_model(tmp_path / name, MODELS[name], None)
    asked = [
        ["--model", str(TINY), *POLICY, "--gpu", "h100"],
        ["--model", str(tmp_path / "fp8"), *POLICY, "--gpu", "b200"],
        ["--model", str(tmp_path / "w4afp8"), *POLICY, "--gpu", "b200"],
    ]
    served, moved, refused = run_all(patched_release(LATEST), asked)
    assert [answer["code"] for answer in (served, moved, refused)] == [0, 0, 1]
    for words in ("served", "h100", "auto: each layer chooses", "1-16, 24-256 by 8", "Triton kernel at 4-16"):
        assert words in served["out"]
    assert "expert policy: MoE runner flashinfer_trtllm (auto) -> triton" in " ".join(moved["out"].split())
    assert UNFIT in " ".join(refused["out"].split())


def test_the_policy_is_told_with_every_key_or_as_refused(patched_release):
    spellings = {
        "oea:k0=3": "oea k0=3, p=1.0, own_share=0.0",
        'moe-spec:budget=9,phases=["decode"]': (
            "moe-spec budget=9, ranking=router, utility=full, coverage=substitute, rescue=true, scope=batch, "
            "own_share=0.0"
        ),
        "observe": 'observe plans=["xshare", "oea"]',
        "oea:k=3": "refused",
        "vanilla": "none: SGLang as it is",
    }
    asked = [["--model", str(TINY), *CPU, "--expert-policy", spelling] for spelling in spellings]
    answers = run_all(patched_release(LATEST), asked, {"COLUMNS": "200"})  # a row each
    rows = [re.search(r"^ policy +(.*?) *$", answer["out"], re.MULTILINE) for answer in answers]
    assert [row and row[1] for row in rows] == list(spellings.values())


BAD = {
    "--gpu h101: ": ["--model", str(TINY), "--gpu", "h101"],
    "--model /nowhere/model: ": ["--model", "/nowhere/model"],
    "--model nobody/no-such-model: ": ["--model", "nobody/no-such-model"],
    "unrecognized arguments: --bogus-xyz": ["--model", str(TINY), "--bogus-xyz"],
    "unrecognized arguments: --tp-sise; did you mean --tp-size?": ["--model", str(TINY), "--tp-sise", "2"],
    f"unrecognized arguments: {TINY}; ": [str(TINY)],
    "--model: missing": ["--tp", "2"],
    "--config /nowhere.yaml: ": ["--config", "/nowhere.yaml"],
    "--trace /nowhere: ": ["--model", str(TINY), "--batch", "4", "--trace", "/nowhere"],
    "--device cpu with --gpu: ": ["--model", str(TINY), "--gpu", "h100", "--device", "cpu"],
}


def test_bad_input_is_one_line(patched_release):
    for line, answer in zip(BAD, run_all(patched_release(LATEST), list(BAD.values())), strict=True):
        assert (answer["code"], answer["out"], answer["err"].count("\n")) == (1, "", 1)
        assert answer["err"].startswith(f"check: {line}")


def test_bad_input_is_told_before_sglang_is_imported(monkeypatch, capsys):
    monkeypatch.setattr("sglang_xshare.check.command._judge", None)
    for line, asked in BAD.items():
        assert main(["check", *asked]) == 1
        assert capsys.readouterr().err.startswith(f"check: {line.partition('; did')[0]}")


@older_releases_take_long
def test_no_flag_of_sglangs_parser_is_taken_for_a_wrong_one(release, patched_release):
    code = """if True:
        import argparse, json
        from sglang.srt.server_args import ServerArgs
        from sglang_xshare.check import flags
        ServerArgs.add_cli_args(parser := argparse.ArgumentParser())
        flags.entry_points = lambda group: ()
        spelt = [one for one in parser._option_string_actions if one.startswith("--")]
        flags.check_known(spelt)
        print(len(spelt))
    """
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=make_env(patched_release(release)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 400


def test_what_cannot_be_judged_is_said_and_the_rest_answered(patched_release):
    asked = ["--model", str(TINY), *POLICY, "--batch", "16", "--gpu"]
    (old,) = run_all(patched_release("0.5.17"), [[*asked, "h100", "--json"]])
    (amd,) = run_all(patched_release(LATEST), [[*asked, "mi300x", "--json"]])
    for answer in (old, amd):
        report = json.loads(answer["out"])
        assert (answer["code"], report["verdict"], report["sglang"]) == (1, "not checked", None)
        assert report["memory"]["fits"]
        assert report["estimate"]["estimates"][0]["tokens_per_s"]
    assert amd["err"].startswith("check: not answered: whether it would be served: --gpu mi300x: ")
    assert old["err"].splitlines()[-1].startswith("check: not answered: whether it would be served: --gpu: ")


def test_an_unpatched_tree_is_one_line(pristine_release):
    env = {"PYTHONDONTWRITEBYTECODE": "1"}  # a pristine tree stays so
    (answer,) = run_all(pristine_release(LATEST), [["--model", str(TINY), *POLICY]], env)
    assert (answer["code"], answer["err"].count("\n")) == (1, 1)
    assert "is not patched; run `sglang-xshare patch apply" in answer["err"]


def test_warnings_are_told_without_colours():
    lines: list[tuple[str, str]] = []
    with _listening(lines):
        logging.getLogger("sglang.srt.server_args").warning("\033[1;33mDEPRECATED:\n --old\033[0m; use --new")
    assert lines == [("SGLang", "DEPRECATED: --old; use --new")]


def test_a_fault_of_ours_is_not_sglangs_refusal(monkeypatch):
    resolution = Resolution()
    monkeypatch.setattr("sglang_xshare.check.resolve.find_refusals", lambda *_: {}["ours"])
    with pytest.raises(KeyError):
        _resolve([], lambda flags: resolution.note_given(SimpleNamespace()), resolution)
    _resolve([], lambda flags: {}["theirs"], resolution)
    assert resolution.refusals == [("SGLang", "'theirs'")]


def test_sizes_are_spelt_as_runs():
    assert spell_sizes([1, 2, 3, 4, 8, 16, 24, 32]) == "1-4, 8-32 by 8"
    assert spell_sizes([1, 2, 4, 8, 12]) == "1, 2, 4-12 by 4"
    assert spell_sizes([7]) == "7"
    assert spell_sizes([]) == ""
