"""Wrong flags and configurations of `check` are one line each; without SGLang it answers what needs none."""

import json
import re

import pytest

from check.asking import QWEN, TINY, compare, pipe, say, say_without
from refused import read_refusal
from sglang_xshare.parser import LARGEST

pytestmark = pytest.mark.usefixtures("served")

SHARDED = ("--tp", "8", "--ep-size", "8")
HIDDEN = ("--speculative-algorithm", "EAGLE3", "--enable-return-aux-hidden-states")
BAD = {  # what is said before SGLang is imported
    "--batch 0": ("--batch", "0"),
    "--batch 1e9": ("--batch", "1e9"),
    "--batch many": ("--batch", "many"),
    f"--context 1{'0' * 400}": ("--context", "1" + "0" * 400, "--active", "8", "4"),
    "--bandwidth inf": ("--bandwidth", "inf"),
    "--bandwidth nan": ("--bandwidth", "nan"),
    "--mem-fraction-static 80%": ("--mem-fraction-static", "80%"),
    "--ep-size 6": ("--tp", "8", "--ep-size", "6"),
    "--ep-size 7": ("--ep-size", "7"),
    "--dp-size 3": ("--tp", "8", "--dp-size", "3", "--enable-dp-attention"),
    "--attn-dp-size 3": ("--tp", "8", "--attn-dp-size", "3"),
    "--json-model-override-args must be a JSON object (got [1])": ("--json-model-override-args", "[1]"),
    f"--json-model-override-args must be a JSON object (got {'[' * 200})": ("--json-model-override-args", "[" * 9_999),
    "--batch with --enable-paged-experts": ("--enable-paged-experts",),
    "--active nan": ("--active", "nan", "4"),
    "--gpu h101": ("--gpu", "h101"),
    "--model /nowhere/model": ("--model", "/nowhere/model"),
    "--model nobody/no-such-model": ("--model", "nobody/no-such-model"),
    "--config /nowhere.yaml": ("--config", "/nowhere.yaml"),
    "--device cpu with --gpu": ("--device", "cpu"),
}
WRONG_STEPS = {
    "--batch 100000000": ("--batch", "100000000"),
    "--ep-size 24": ("--tp", "24", "--ep-size", "24"),
    "--active 9 4": (*SHARDED, "--active", "9", "4"),
    "--active with 2 policies": (*compare("xshare", "oea:k0=3"), "--active", "40", "20"),
    "--compare oea:k0=9: k0 = 9": compare("oea:k0=9"),
    "--compare oea:k0=x: k0 = 'x'": compare("oea:k0=x"),
    "--compare moe-spec:budget=32: moe-spec selects in verify steps only": compare("moe-spec:budget=32"),
    "--compare vanilla": compare("vanilla"),
    "--compare xshare: --batch 1": ("--batch", "1", *compare("xshare")),
    "--active 65 10": ("--active", "65", "10"),
    "--active 20 40: AFTER 40": ("--active", "20", "40"),
}


@pytest.mark.parametrize("line", [*BAD, *WRONG_STEPS])
def test_bad_input_is_one_line(line, monkeypatch, capsys):
    if line in BAD:
        monkeypatch.setattr("sglang_xshare.check.command._judge", None)
    assert say("--model", TINY, "--gpu", "h100", "--batch", 16, *(BAD | WRONG_STEPS)[line]) == 1
    assert read_refusal(capsys).startswith(f"check: {line}" + ": " * ("must be" not in line))


def test_a_model_must_be_named(capsys):
    assert say("--tp", 2) == 1
    assert read_refusal(capsys).startswith("check: --model: missing")


@pytest.mark.parametrize("flags", [compare("xshare"), ("--context", "5"), ("--active", "20", "10")])
def test_what_is_of_a_batch_asks_for_one(flags, capsys):
    assert say("--model", TINY, *flags) == 1
    assert read_refusal(capsys).startswith(f"check: {flags[0]} without --batch: ")


def test_the_shortest_step_that_is_allowed_is_estimated(estimate):
    (row,) = estimate("--model", TINY, "--batch", 2, "--context", 0, "--bandwidth", LARGEST, "--active", 1, 1)
    assert min(row["step_ms"]) > 0
    assert row["speedup"] == 1


NO_NUMBER = {
    **{"hidden_size": float("nan"), "num_experts": "128", "num_experts_per_tok": 8.5},
    **{"moe_intermediate_size": None, "vocab_size": True, "num_key_value_heads": 1e30},
}
TOO_FAR = {"hidden_size": -5, "vocab_size": 10**30, "moe_intermediate_size": 0, "num_attention_heads": 0}


@pytest.mark.parametrize(("key", "value"), [*NO_NUMBER.items(), *TOO_FAR.items()])
def test_a_configuration_with_a_wrong_number_is_one_line(key, value, write, capsys):
    """No other number takes the place of one that is null."""
    assert say("--model", write(QWEN | {key: value}), "--gpu", "h100") == 1
    out, err = capsys.readouterr()
    assert err.startswith("check: not answered: weights and what depends on them: ")
    assert value == TOO_FAR.get(key) or key in err
    assert (err.count("\n"), len(err) < 400) == (1, True)
    assert re.search("verdict +not checked", out)


DECLARED = "quantization_config"
UNCOUNTED = {
    "{folder}: no config.json": None,
    ": --model {folder}: config.json: ": "{",
    "check: --model {folder}: config.json must be a JSON object (got [1, 2])\n": "[1, 2]",
    ": config.json: maximum recursion depth exceeded": "[" * 100_000,
    "quantization_config: re:*mlp.gate must be a reg": {DECLARED: {"quant_method": "fp8", "ignore": ["re:*mlp.gate"]}},
    "quantization odd are unknown without safetensors; must be one of fp8, ": {DECLARED: {"quant_method": "odd"}},
    "the bytes of quantization missing are unknown": {DECLARED: {"bits": 4}},
    "quantization_config has no num_bits; must be an integer": {DECLARED: {"quant_method": "compressed-tensors"}},
    "1,000,000,000,000 layers: must be 1 to 10,000": {"num_hidden_layers": 10**12},
    "1,000,000,000,000 experts: must be 2 to 10,000": {"num_experts": 10**12},
}


@pytest.mark.parametrize("line", UNCOUNTED)
def test_a_model_whose_bytes_are_not_known_is_one_line(line, tmp_path, capsys):
    config = UNCOUNTED[line]
    if config is not None:
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(QWEN | config))
    assert say("--model", tmp_path, "--gpu", "h100", "--batch", 16) == 1
    assert line.replace("{folder}", str(tmp_path)) in capsys.readouterr().err


@pytest.mark.parametrize("heads", ["8", -8, 8.5])
def test_heads_beside_safetensors_are_an_integer(heads, capsys):
    changes = json.dumps({"num_key_value_heads": heads})
    assert say("--model", TINY, "--gpu", "h100", "--json-model-override-args", changes) == 1
    line = f"config.json: num_key_value_heads must be a positive integer (got {heads!r})\n"
    assert capsys.readouterr().err.endswith(line)


@pytest.fixture
def without_sglang(served, monkeypatch):
    monkeypatch.undo()  # what `served` has put in place of asking SGLang
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


@pytest.mark.usefixtures("without_sglang")
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--expert-policy-config", '{"k0": 1}'], "must be used with --expert-policy"),
        (["--expert-policy-trace", "trace.jsonl"], "must be used with --expert-policy"),
        (["--expert-policy-on-disagreement", "stop"], "must be used with --expert-policy"),
        (["--expert-policy-ignore-client-exact"], "must be used with --expert-policy"),
        (["--expert-policy", "xshere"], "xshere: policy = 'xshere'"),
        (["--expert-policy", "oea", "--expert-policy-config", '{"k": 3}'], "k = 3: oea has no such key"),
        (["--expert-policy", "xshare:add_per_request=4"], "add_per_request = 4: must be 0, "),
        (["--expert-policy", "vanilla", "--mask-padding-experts"], "vanilla routes as the model does"),
        (["--expert-policy", "moe-spec:budget=2", *HIDDEN], "must be used with --speculative-algorithm"),
    ],
)
def test_without_sglang_the_flags_of_a_policy_are_refused_as_a_server_refuses_them(flags, says, tell):
    report = tell("--model", TINY, "--gpu", "h100", *flags, code=1)
    (refusal,) = report["refusals"]
    assert (report["verdict"], report["not_answered"], refusal["by"]) == ("refused", [], "sglang-xshare")
    assert says in refusal["says"]
    assert "\n" not in refusal["says"]


@pytest.mark.usefixtures("without_sglang")
def test_without_sglang_the_flags_of_a_policy_that_a_server_takes_refuse_nothing(tmp_path, tell):
    policy = ("--expert-policy", "xshare", "--expert-policy-config", '{"add_per_request": 4}')
    more = ("--expert-policy-trace", tmp_path / "trace.jsonl", "--expert-policy-on-disagreement", "stop")
    report = tell("--model", TINY, "--gpu", "h100", *policy, *more, "--speculative-algorithm", "NGRAM", code=1)
    unanswered = ["whether it would be served: SGLang is not installed here"]  # and no flag of `patch`
    assert (report["verdict"], report.get("refusals"), report["not_answered"]) == ("not checked", None, unanswered)


@pytest.mark.usefixtures("without_sglang")
def test_without_sglang_too_a_policys_file_is_read_once(tell):
    policy = ("--expert-policy", "oea", "--expert-policy-config", pipe('{"k0": 3}'))
    report = tell("--model", TINY, "--batch", 2, "--active", 9, 8, *policy, code=1)
    assert (report.get("refusals"), len(report["not_answered"])) == (None, 1)
    assert report["estimate"]["estimates"][0]["policy"].startswith("oea /proc/")


@pytest.mark.usefixtures("without_sglang")
def test_a_gpu_is_the_same_in_capitals(tell):
    capitals, small = (tell("--model", TINY, "--gpu", name, code=1) for name in ("H100", "h100"))
    assert (capitals, small["never_executed"]) == (small, [])


def ask_alone(*asked):
    """Run the command without torch, SGLang and transformers. Returns (its report, its errors)."""
    said = say_without("torch sglang transformers huggingface_hub yaml", *asked, "--json")
    assert said.code == 1, said.err
    return json.loads(said.out), said.err


def test_without_torch_and_sglang_safetensors_are_counted():
    asked = ["--model", str(TINY), "--gpu", "h100", "--batch", "16", "--expert-policy", "oea:k0=3"]
    known, lines = ask_alone(*asked, "--active", "48.8", "25.1")
    assert known["verdict"] == "not checked"
    assert (known["weights"]["moe_layers"], known["weights"]["source"]) == (4, "safetensors")
    assert known["estimate"]["estimates"][0]["speedup"] > 1
    assert len(lines) == 1
    assert lines[0].startswith("check: not answered: whether it would be served: ")
    drawn, more_lines = ask_alone(*asked)
    assert (drawn["estimate"], more_lines[:-1]) == (None, lines)
    assert more_lines[-1].startswith("check: not answered: active experts: ")


def test_without_torch_a_configuration_alone_is_not_counted(write):
    report, lines = ask_alone("--model", str(write(QWEN)), "--gpu", "h100")
    assert "weights" not in report
    assert lines[-1].endswith("weights and what depends on them: they need torch, or the model's safetensors")
