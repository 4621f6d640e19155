"""The command: what it leaves, what it says, and what it refuses before anything is measured."""

import json
import os
import signal
from argparse import ArgumentParser
from dataclasses import replace

import pytest

from refused import read_refusal
from sglang_xshare.cli import main
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.tune import command
from sglang_xshare.tune.plans import VANILLA_SETTING
from sglang_xshare.tune.search import search
from tune.fake import SETTINGS, SMALL, WEIGHTS, read_found, tune


def test_the_command_leaves_a_plan_that_the_server_takes(texts, tmp_path, server, capsys):
    assert tune(texts, tmp_path / "out", "--tolerance", "5%", "--batches", "4", "16") == 0
    plan, report = read_found(tmp_path / "out")
    assert plan == {name: value for name, value in report["policy"].items() if name != "policy"}
    assert plan["by_rows"].keys() == {"2-4"}
    server.set_policy({"policy": "xshare", **plan})
    out = capsys.readouterr().out
    assert "sglang-xshare policy set http://fake xshare --config" in out
    for batch in report["batches"]:
        chosen, active = batch["trials"][batch["chosen"]], server._count(batch["batch"])
        assert sum(active.get(layer, 40) for layer in WEIGHTS) / 4 == chosen["experts"]
        assert batch["greedy_agreement"] == chosen["held_out_agreement"] == 1
        loss = chosen["held_out"]
        assert batch["interval_within_tolerance"] == (loss["delta"] + 1.96 * loss["error"] <= batch["tolerance_nats"])
        assert f"{batch['batch']} rows, held-out samples: {chosen['held_out_experts']:.1f} active experts in" in out
        assert "greedy agreement 100.0%; loss +" in out
    unsure = [batch for batch in report["batches"] if not batch["interval_within_tolerance"]]
    assert out.count("which reaches past") == len(unsure)


def test_what_its_server_allows_to_clients_is_said_first(texts, tmp_path, server, capsys):
    assert tune(texts, tmp_path / "out") == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("Warning: with --enable-custom-logit-processor SGLang unpickles what any client sends")
    assert first.endswith("tune on a server that nobody else can reach, and serve without that flag")
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "with which any client can run code" in told


def test_the_server_has_its_own_policy_again(texts, tmp_path, server, monkeypatch):
    assert tune(texts, tmp_path / "out") == 0
    assert server.policy == {"policy": "xshare"}
    monkeypatch.setattr("sglang_xshare.tune.search.search", lambda *args: os.kill(os.getpid(), signal.SIGTERM))
    server.policy = {"policy": "oea", "k0": 3}
    assert tune(texts, tmp_path / "other") == 130
    assert server.policy == {"policy": "oea", "k0": 3}
    assert signal.getsignal(signal.SIGHUP) is signal.default_int_handler, "of a lost terminal"


def test_without_a_trial_within_the_tolerance_the_plan_is_vanilla(texts, tmp_path, server, capsys):
    server.exact_rule = {"priority": 10}
    assert tune(texts, tmp_path / "out", "--tolerance", "0.0001%") == 0
    out = capsys.readouterr().out
    assert "16 rows: vanilla, because no trial stays within the tolerance." in out
    assert "policy set" not in out
    plan, report = read_found(tmp_path / "out")
    assert (plan, report["policy"], report["batches"][0]["chosen"]) == ({}, {"policy": "vanilla"}, None)


def test_a_size_without_a_trial_within_the_tolerance_is_vanilla_in_all_layers(texts, tmp_path, server, monkeypatch):
    def find_none_for_4(*args):
        found = search(*args)
        return replace(found, chosen=None) if found.batch == 4 else found

    monkeypatch.setattr("sglang_xshare.tune.search.search", find_none_for_4)
    assert tune(texts, tmp_path / "out", "--tolerance", "5%", "--batches", "4", "16") == 0
    plan, _ = read_found(tmp_path / "out")
    schedule = build_schedule("xshare", plan, speculative=False)
    assert [schedule.plan(layer, 4) for layer in WEIGHTS] == [None] * len(WEIGHTS)
    assert any(schedule.plan(layer, 16) for layer in WEIGHTS)


def test_an_interval_beyond_the_tolerance_is_said(texts, tmp_path, server, capsys):
    """A tolerance just above the loss that was found with a wider one."""
    assert tune(texts, tmp_path / "out", "--tolerance", "40%") == 0
    assert "reaches past" not in capsys.readouterr().out
    [batch] = read_found(tmp_path / "out")[1]["batches"]
    chosen = batch["trials"][batch["chosen"]]
    assert batch["interval_within_tolerance"]
    spent = max(chosen["loss"]["delta"], chosen["held_out"]["delta"]) / batch["cross_entropy"]
    assert tune(texts, tmp_path / "out", "--tolerance", str(spent * 1.0001)) == 0
    [batch] = read_found(tmp_path / "out")[1]["batches"]
    assert not batch["interval_within_tolerance"]
    *_, last, _, _ = capsys.readouterr().out.splitlines()
    assert last.startswith("16 rows, held-out samples: ")
    assert last.endswith("which reaches past the tolerance: more --samples narrow it.")


def test_an_out_that_cannot_be_written_is_told_before_anything_is_measured(texts, tmp_path, server, capsys):
    (tmp_path / "file").write_text("kept")
    for out in (tmp_path / "file", tmp_path / "file" / "in", "/proc/none"):
        assert tune(texts, out) == 1
        err = read_refusal(capsys)
        assert err.startswith(f"tune: --out {out}: ")
        assert "Errno" not in err
    assert server.switched == []
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tolerance", "0"), "--tolerance 0: must be a share"),
        (("--tolerance", "100%"), "--tolerance 100%: must be a share"),
        (("--tolerance", "1%", "--batches", "0"), "--batches 0:"),
        (("--tolerance", "1%", "--groups", "x"), "--groups x:"),
        (("--tolerance", "1%", "--samples", "1"), "--samples 1:"),
        (("--tolerance", "1%", "vanilla"), "policy 'vanilla': "),
        (("--tolerance", "1%", "xshare:k0=x"), "k0 = 'x'"),
    ],
)
def test_wrong_flags_are_one_line(texts, tmp_path, server, capsys, flags, message):
    with pytest.raises(SystemExit) as ended:
        tune(texts, tmp_path / "out", *flags)
    assert message in read_refusal(capsys)
    assert ended.value.code == 1


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--samples 900", "--texts {texts}/0.txt: 7,904 tokens, 464 samples of --prompt and --tokens; must have 600 "),
        ("--batches 4 99", "--batches 99: "),
        ("--prompt 5000", "--texts {texts}/0.txt: 7,904 tokens, 1 samples of "),
        ("--batches 32 --prompt 5000", "prompt tokens of a batch must be at most the server's chunked_prefill_size, "),
        ("xshare:k0=99", "POLICY xshare:k0=99: k0 = 99: "),
    ],
)
def test_what_asks_for_more_than_there_is_is_one_line(flags, line, texts, tmp_path, server, capsys):
    assert tune(texts, tmp_path / "out", "--tolerance", "5%", *flags.split()) == 1
    assert read_refusal(capsys).startswith(f"tune: {line.format(texts=texts)}")
    assert server.switched == []
    assert (tmp_path / "out").exists() == flags.startswith(("--samples", "--prompt"))


def test_defaults():
    parser = ArgumentParser()
    command.add_parser(parser.add_subparsers())
    given = parser.parse_args(["tune", "http://fake", "--texts", "in", "--tolerance", "1%", "--out", "out"])
    assert (given.batches, given.groups, given.samples, given.prompt, given.tokens) == ([16], 8, 64, 64, 64)
    assert given.policies == list(command.SETTINGS)


@pytest.mark.parametrize(
    ("most", "chunk", "page", "ranks"),
    [(None, None, 1, 1), (40, -1, 1, 1), (40, 400, 1, 1), (40, 640, 16, 1), (40, 200, 1, 2)],
)
def test_a_batch_may_have_all_that_the_server_decodes_at_a_time(most, chunk, page, ranks):
    """And all that it prefills at a time, which SGLang counts in whole pages, and on each rank."""
    info = {"chunked_prefill_size": chunk, "page_size": page, "attn_dp_size": ranks}
    command._check_batch(40, 10, most, info)
    if (chunk or -1) > 0:
        with pytest.raises(ValueError, match=rf"must be at most .*, {chunk - 1} \(got {chunk}\)"):
            command._check_batch(40, 10, most, info | {"chunked_prefill_size": chunk - 1})


def test_what_the_server_left_exact_stays_so_in_the_plan(texts, tmp_path, server):
    server.policy, server.exact_rule = {"policy": "vanilla"}, {"priority": 10}
    assert tune(texts, tmp_path / "out") == 0
    plan, _ = read_found(tmp_path / "out")
    assert plan["exact"] == {"priority": 10}
    assert "min_rows" not in plan


def test_a_policy_may_stand_behind_flags(texts, tmp_path, server, capsys):
    mixed = ["--texts", str(texts), SETTINGS[1], "--tolerance", "5%", SETTINGS[2], "--out", str(tmp_path / "out")]
    assert main(["tune", "http://fake", *mixed, *SMALL, "--groups", "1"]) == 0
    _, report = read_found(tmp_path / "out")
    tried = {one["name"] for options in report["batches"][0]["options"].values() for one in options}
    assert tried <= {VANILLA_SETTING, *SETTINGS[1:3]}
    assert [*report["batches"][0]["options"]] == ["0-3"], "one group"


def test_what_was_measured_of_other_samples_models_or_figures_is_measured_anew(texts, tmp_path, server, capsys):
    """The last as by a version before divergences."""

    def measure(*flags: str) -> int:
        assert tune(texts, tmp_path / "out", "--tolerance", "5%", *flags) == 0
        [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Measured ")]
        return int(line.split()[1])

    first = measure()
    assert measure() == 0
    assert measure("--samples", "24") > 0
    assert measure() == 0, "what was known is kept"
    trace = tmp_path / "out/trace.jsonl"
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    older = [{name: value for name, value in line.items() if name not in ("of", "divergences")} for line in lines]
    trace.write_text("".join(json.dumps(line) + "\n" for line in older))
    assert measure() == first
    (texts / "0.txt").write_bytes((texts / "0.txt").read_bytes()[5:])
    assert measure() == first
    server.get_model = lambda: "another"
    assert measure() == first


def test_where_experts_are_paged_all_is_told_of_page_ins(texts, tmp_path, server, capsys):
    server.paged = True
    assert tune(texts, tmp_path / "out") == 0
    assert "page-ins in place of 4.0" in " ".join(capsys.readouterr().out.split())
    plan, report = read_found(tmp_path / "out")
    assert report["batches"][0]["counted"] == "page-ins"
    assert plan["min_rows"] == 2, "one row was not measured"
    server.paged = False
    assert tune(texts, tmp_path / "out") == 0
    assert "active experts in place of 40.0" in " ".join(capsys.readouterr().out.split()), "measured anew"
