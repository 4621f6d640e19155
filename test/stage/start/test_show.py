"""`sglang-xshare policies --show`: the plan in force, warnings, and one line for what a server refuses."""

import json
import re

import pytest

from sglang_xshare.cli import main


@pytest.fixture
def show(capsys):
    """Call it with the words after --show for (exit code, plan, what stderr says)."""

    def run(*words: str) -> tuple[int, dict[str, object], str]:
        code = main(["policies", "--show", *words])
        said = capsys.readouterr()
        return code, json.loads(said.out or "{}"), said.err

    return run


@pytest.mark.parametrize(
    "words",
    [
        ["xshare:k0=2,mass=0.5"],
        ['xshare:{"k0": 2, "mass": 0.5}'],
        ["xshare", '{"k0": 2, "mass": 0.5}'],
        ['xshare {"k0": 2, "mass": 0.5}'],
        ["xshare:k0=2", '{"mass": 0.5}'],
    ],
)
def test_every_spelling_of_a_policy_shows_every_key(words, show):
    code, plan, said = show(*words)
    assert (code, said) == (0, "")
    assert plan == {
        **{"policy": "xshare", "k0": 2, "p": 1.0, "utility": "topk", "add": 0, "add_per_request": 0, "mass": 0.5},
        **{
            "target_per_rank": None,
            "balance": "literal",
            "free_residents": None,
            "own_share": 0.0,
            "phases": ["decode", "verify"],
            "min_tokens": 2,
        },
        **{"max_tokens": None, "rows": "batch", "overrides": []},
    }


def test_defaults_are_those_of_a_server_that_speculates(show):
    assert show("xshare")[1]["add"] == 24
    assert show("xshare", "--draft-tokens", "4")[1]["add_per_request"] == 4


def test_vanilla_has_nothing_to_show(show):
    assert show("vanilla") == (0, {"policy": "vanilla"}, "")


def test_a_model_resolves_limits_and_finds_what_has_no_effect(show, tiny_model):
    code, plan, said = show("oea", "--model", str(tiny_model))
    assert (code, plan["kmax"], said) == (0, 8, "")
    assert plan["model"] == {"architecture": "Qwen3MoeForCausalLM", "num_layers": 4, "num_experts": 64, "top_k": 8}
    code, plan, said = show("xshare:add=240", "--model", str(tiny_model))
    assert (code, plan["add"]) == (0, 240)
    line = (
        "--expert-policy xshare: this plan (k0 = 1, add = 240) never drops one of 64 experts; with add below 63 it can"
    )
    assert said == f"warning: {line}\n"
    said = show("xshare", "--model", str(tiny_model), "--batch", "2")[2]
    assert said.startswith("warning: --expert-policy xshare: add = 24: 14 hold all that 2 rows want")
    budget = ("xshare:add_per_request=8", "--model", str(tiny_model), "--batch", "4", "--draft-tokens")
    assert "add_per_request = 8: 7 hold all" in show(*budget, "1")[2]
    assert show(*budget, "2")[2] == ""


def test_a_file_with_overrides(show, tmp_path):
    file = tmp_path / "policy.json"
    file.write_text('{"k0": 1, "add": 24, "by_batch": {"2-7": {"add": 16}}, "layers": {"0": {"policy": "vanilla"}}}')
    assert show("xshare", str(file))[1]["overrides"] == [
        {"by_batch": "2-7", "add": 16},
        {"layers": "0", "policy": "vanilla"},
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["xshere"], "--expert-policy xshere: policy = 'xshere': allowed is .*; did you mean xshare\\?"),
        (["xshare", "{"], "--expert-policy-config {: malformed JSON .*"),
        (["xshare", "k0=1"], "--expert-policy-config k0=1: No such file or directory; allowed is JSON text .*"),
        (["a", "b", "c"], "--show a b c: 3 words; allowed is a policy, and its configuration"),
        (["", "--model", "/nowhere"], "--expert-policy : policy = '': allowed is one of .*"),
        (["oea", "--model", "/nowhere"], "--model /nowhere: config.json: No such file or directory; .*"),
        (["oea:k0=9", "--model", "{tiny}"], "--expert-policy oea: k0 = 9: allowed is at most the model's top-k, 8"),
        (
            ["xshare:target_per_rank=4", "--model", "{tiny}"],
            "--expert-policy xshare: target_per_rank = 4: allowed only with expert parallelism",
        ),
    ],
)
def test_what_a_server_refuses_is_refused_in_one_line(words, line, show, tiny_model):
    code, plan, said = show(*(word.replace("{tiny}", str(tiny_model)) for word in words))
    assert (code, plan) == (1, {})
    assert len(said.splitlines()) == 1
    assert re.fullmatch(f"policies: {line}\n", said)


@pytest.mark.parametrize("flag", ["--batch", "--ep-size", "--draft-tokens"])
def test_counts_are_positive(flag, show, capsys):
    with pytest.raises(SystemExit) as ended:
        show("xshare", flag, "0")
    assert ended.value.code == 2
    assert "0: allowed is an integer of at least 1" in capsys.readouterr().err


def test_a_batch_too_small_for_the_policy_is_warned_of(show, tiny_model):
    code, _, said = show("oea", "--model", str(tiny_model), "--batch", "1")
    assert code == 0
    assert "min_tokens = 2: the largest batch has 1 rows (--batch 1), so that it never selects" in said
    assert "never selects" not in show("oea", "--model", str(tiny_model), "--batch", "2")[2]
