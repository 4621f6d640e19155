"""`sglang-xshare check` says what a server would: the same refusals, and what SGLang resolves for another GPU."""

import json
import re
import shlex
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from check.asking import TINY, run_all
from compatibility import test_expert_placement
from compatibility.refusals import attempt
from compatibility.test_server import ACCEPTED, LISTS, POLICY, keys, list_flags, written  # noqa: F401 - a fixture
from served.release import CPU, LATEST, older_releases_take_long

AFFINITY = ("--load-balance-method", "expert_affinity")
# Wrong in one part of the arguments each, as given or as resolved: any two of them say in which order they are checked.
WRONG = [
    (test_expert_placement.FLAG, "shard"),
    ("--expert-policy", "nope"),
    (*POLICY, "--enable-two-batch-overlap"),
    (*POLICY, "--max-running-requests", "1"),
    (*POLICY, "--model-path", "{written}/dense"),
    (*POLICY, "--expert-policy-trace", "/tmp/trace.jsonl", "--dp-size", "2"),
    AFFINITY,
    ("--expert-affinity", "t"),
]
WITHOUT_POLICY = [
    ("--expert-policy-config", '{"k0": 1}'),
    ("--expert-policy-trace", "/tmp/trace.jsonl"),
    ("--expert-policy-on-disagreement", "stop"),
    ("--expert-policy-ignore-client-exact",),
]


def list_asked(release: str) -> list[tuple[str, ...]]:
    """Return the flags that may be refused: those of `test_server.py`, of placements, of affinity, of two parts, and of
    a policy that is not named.
    """
    served = [flags for kind in LISTS for cases in list_flags(kind, release) for flags in cases.values()]
    both = [(*one, *two) for one, two in combinations(WRONG, 2)]
    return [*served, *test_expert_placement.RESOLVED, *WRONG, *both, *WITHOUT_POLICY]


@cache
def ask_as_servers(tree: Path, folder: Path, release: str) -> dict[tuple[str, ...], dict[str, str]]:
    """The answers to all of them."""
    lines = [
        ["--json", "--model-path", str(TINY), *CPU, *(word.replace("{written}", str(folder)) for word in arguments)]
        for arguments in list_asked(release)
    ]
    return dict(zip(list_asked(release), run_all(tree, lines), strict=True))


@older_releases_take_long
def test_its_first_refusal_is_the_servers(release, patched_release, written):  # noqa: F811
    """`test_server.py` has the lines."""
    tree, asked = patched_release(release), list_asked(release)
    servers = attempt(tree, TINY, [[word.replace("{written}", str(written)) for word in flags] for flags in asked])
    answers = ask_as_servers(tree, written, release)
    wrong, refused = {}, 0
    for flags, server in zip(asked, servers, strict=True):
        report = json.loads(answers[flags]["out"])
        told = [{"ours": one["by"] == "sglang-xshare", "says": one["says"]} for one in report["refusals"]]
        alike = told[:1] == ([server] if server else []) and len({one["says"] for one in told}) == len(told)
        if not alike or (answers[flags]["code"], report["served"]) != (int(server is not None), server is None):
            wrong[" ".join(flags)] = server, told
        refused += server is not None
    assert wrong == {}
    assert refused > 80, "or this compares nothing"


@older_releases_take_long
def test_what_it_reports_of_a_server_that_is_served(release, patched_release, written):  # noqa: F811
    answers = ask_as_servers(patched_release(release), written, release)
    reports = {case: json.loads(answers[arguments]["out"]) for case, arguments in ACCEPTED.items()}
    report = reports["bare xshare"]
    model = {"architecture": "Qwen3MoeForCausalLM", "executed_as": "Qwen3-MoE", "layers": 4, "experts": 64, "top_k": 8}
    assert (report["model"], report["sglang"], report["device"]) == (model, release, "cpu")
    resolved = {"k0": 1, "p": 1.0, "utility": "topk", "add": 0, "add_per_request": 0, "balance": "literal"}
    resolved |= {"mass": 0.93, "own_share": 0.0, "acceptance": 1.0}
    resolved["overrides"] = [{"by_rows": "2-7", "mass": 0.85}, {"by_rows": "8-15", "mass": 0.9}]
    assert report["plan"].items() >= {"policy": "xshare", **resolved, "min_rows": 2}.items()
    start = ["SGLANG_USE_CPU_ENGINE=1", "sglang", "serve", "--model-path", str(TINY), *CPU]
    for case in ("bare xshare", "no policy"):  # whose report is bare xshare's
        assert shlex.split(reports[case]["start"]) == [*start, *ACCEPTED["bare xshare"]]
        assert reports[case]["plan"] == report["plan"]


MODEL = ("--model", str(TINY), *CPU)
OVERRIDES = ("--expert-policy", "oea", "--expert-policy-config", '{"k0": 3, "layers": {"0": {"policy": "vanilla"}}}')
SPELLINGS = {
    "oea:k0=3": "oea k0=3, p=1.0, kmax=8, own_share=0.0, ",
    'moe-spec:budget=9,phases=["decode"]': "moe-spec budget=9, ranking=router, utility=full, coverage=substitute, ",
    "observe": 'observe plans={"xshare": {"policy": "xshare", ',
    "oea:k=3": None,
    "vanilla": None,
}
"""Policies, each with the beginning of its row in the report."""
ASKED = {
    "plan": ("--json", *MODEL, *OVERRIDES),
    "plan in a table": (*MODEL, *OVERRIDES),
    "drafts": ("--json", *MODEL, "--batch", "1", "--speculative-algorithm", "NGRAM"),
    "several refusals": (
        *("--json", *MODEL, "--moe-runner-backend", "hpc_ops"),
        *("--expert-policy-trace", "/tmp/trace.jsonl", "--dp-size", "2"),
        *("--max-running-requests", "1", *keys('{"k0": 9}')),
    ),
    **{spelling: (*MODEL, "--expert-policy", spelling) for spelling in SPELLINGS},
}


@pytest.fixture(scope="session")
def told(patched_release):
    """The answers to ASKED, from one process, in tables that are wide enough for a row each."""
    asked = [list(flags) for flags in ASKED.values()]
    return dict(zip(ASKED, run_all(patched_release(LATEST), asked, {"COLUMNS": "2000"}), strict=True))


def test_the_plan_is_the_models(told):
    """Every default resolved, the model's top-k for what stands for it, and overrides."""
    found = json.loads(told["plan"]["out"])["plan"]
    assert (found["kmax"], found["overrides"]) == (8, [{"layers": "0", "policy": "vanilla"}])
    assert '{"layers": "0", "policy": "vanilla"}' in told["plan in a table"]["out"]


def test_a_request_with_drafts_is_of_bare_xshare_too(told):
    """It has rows enough, of which SGLang tells how many."""
    estimate = json.loads(told["drafts"]["out"])["estimate"]
    assert (estimate["rows"] > 1, {row["policy"] for row in estimate["estimates"]}) == (True, {"xshare"})


def test_all_kinds_of_refusals_are_told(told):
    report = json.loads(told["several refusals"]["out"])
    flags = [refusal["says"].split()[0].rstrip(":") for refusal in report["refusals"]]
    assert flags == ["--moe-runner-backend", "--expert-policy-trace", "--expert-policy"]
    assert (report["verdict"], "start" in report) == ("refused", False)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_policy_is_told_with_every_key_where_it_would_be_served(spelling, told):
    out, start = told[spelling]["out"], SPELLINGS[spelling]
    row = re.search(r"^ policy +(.*?) *$", out, re.MULTILINE)
    assert (row[1].startswith(start) if row else None) is (start and True), row
    started = shlex.join(["SGLANG_USE_CPU_ENGINE=1", "sglang", "serve", *ASKED[spelling]])
    assert (f"Start it: {started}\n" in out) is (spelling != "oea:k=3")


UNKNOWN = (["--bogus-xyz"], ["--tp-sise", "2"], ["stray"], ["--mem-fraction-statick=0.8"])


@older_releases_take_long
def test_sglangs_parser_tells_an_unknown_flag_in_one_line(release, patched_release):
    asked = [["--model", str(TINY), *CPU, *flags] for flags in UNKNOWN]
    for flags, answer in zip(UNKNOWN, run_all(patched_release(release), asked), strict=True):
        assert (answer["code"], answer["out"]) == (1, "")
        assert answer["err"] == f"check: unrecognized arguments: {' '.join(flags)}\n"


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
