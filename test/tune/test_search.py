"""The search on a server whose losses are known: it spends the tolerance where it buys most, and resumes."""

import json
import os
import signal

import pytest

from refused import read_refusal
from sglang_xshare.cli import main
from sglang_xshare.live.client import PolicyError
from sglang_xshare.tune.gauge import Gauge
from sglang_xshare.tune.hold import Hold, Switched
from sglang_xshare.tune.measure import Bench
from sglang_xshare.tune.plans import VANILLA_SETTING, group_layers
from sglang_xshare.tune.search import count_measurements, search
from sglang_xshare.tune.texts import read_samples
from tune.fake import WEIGHTS, FakeServer

SETTINGS = tuple(f"xshare:k0=1,add={add}" for add in (0, 2, 4, 8, 16, 24))


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        text = bytes((place * 7 + number) % 251 for place in range(4000)).decode(errors="replace")
        (folder / f"{number}.txt").write_bytes(text.encode())
    return folder


def run(texts, tmp_path, tolerance=0.05, server=None, groups=4):
    server = server or FakeServer()
    parts = dict(zip(("tuning", "held out"), read_samples(texts, server.tokenize, 8, 8, 12), strict=True))
    bench = Bench(Gauge(server, parts), tmp_path / "trace.jsonl")
    told: list[str] = []
    return bench, search(bench, group_layers(list(WEIGHTS), groups), SETTINGS, 4, tolerance, told.append), told


def test_layers_that_lose_little_give_most(texts, tmp_path):
    bench, found, told = run(texts, tmp_path)
    assert found.chosen is not None
    assert found.chosen.loss.delta <= found.tolerance == pytest.approx(0.05 * found.cross_entropy)
    adds = [setting.partition("add=")[2] for setting in found.chosen.settings.values()]
    assert [int(add) for add in adds[:2]] == [0, 0]
    assert found.chosen.settings[(3,)] in (VANILLA_SETTING, SETTINGS[-1], SETTINGS[-2])
    assert found.before == 40
    assert found.chosen.held_out_experts == found.chosen.experts < 25
    # Vanilla, one setting everywhere, each in each group, vanilla held out, and a choice of 25 on both halves.
    assert len(bench.known) == bench.measured <= count_measurements(4, len(SETTINGS)) == 3 + 4 * len(SETTINGS) + 2 * 5
    assert any(line.startswith("held out") for line in told)


def test_the_tolerance_is_spent_to_the_last_setting_of_a_group(texts, tmp_path):
    _, found, _ = run(texts, tmp_path)
    spent = max(found.chosen.loss.delta, found.chosen.held_out.delta)
    assert spent <= found.tolerance
    tighter = [trial for trial in found.trials if trial.experts < found.chosen.experts]
    assert tighter
    assert all(max(one.loss.delta, spent) > found.tolerance for one in tighter)
    closest = min(tighter, key=lambda one: found.chosen.experts - one.experts)
    changed = [group for group in closest.settings if closest.settings[group] != found.chosen.settings[group]]
    assert len(changed) == 1


def test_more_is_tolerated_fewer_experts_are_left(texts, tmp_path):
    experts = []
    for number, tolerance in enumerate((0.01, 0.03, 0.1, 0.4)):
        (folder := tmp_path / str(number)).mkdir()
        experts.append(run(texts, folder, tolerance)[1].chosen.experts)
    assert experts == sorted(experts, reverse=True)
    assert experts[-1] == 8


def test_layers_that_graphs_count_though_they_are_vanilla_save_nothing(texts, tmp_path):
    found = []
    for captured in (False, True):
        (folder := tmp_path / str(captured)).mkdir()
        found.append(run(texts, folder, server=FakeServer(captured=captured))[1])
    assert found[0] == found[1]


@pytest.mark.parametrize("rows", [0.5, 1.5])
def test_a_server_whose_steps_have_other_rows_is_refused(texts, tmp_path, rows):
    with pytest.raises(ValueError, match=f"^{4 * rows} rows a step in place of 4"):
        run(texts, tmp_path, server=FakeServer(rows=rows))


def test_half_a_line_in_the_trace_is_measured_again(texts, tmp_path):
    first = run(texts, tmp_path)[1]
    trace = tmp_path / "trace.jsonl"
    trace.write_text(trace.read_text()[:-20])
    bench, again, _ = run(texts, tmp_path)
    assert bench.measured == 1
    assert again == first


def test_losses_that_do_not_add_up_are_corrected(texts, tmp_path):
    _, found, _ = run(texts, tmp_path, server=FakeServer(synergy=0.01))
    assert found.chosen is not None
    assert found.chosen.loss.delta <= found.tolerance
    assert found.chosen.loss.delta > found.chosen.predicted


def test_where_held_out_samples_lose_more_less_is_allowed(texts, tmp_path):
    held_out = read_samples(texts, FakeServer().tokenize, 8, 8, 12)[1]
    _, found, _ = run(texts, tmp_path, tolerance=0.1, server=FakeServer(harder=[one.prompt for one in held_out]))
    assert found.chosen is not None
    assert found.chosen.loss.delta < 0.8 * found.tolerance
    assert 0.5 * found.tolerance < found.chosen.held_out.delta <= found.tolerance


def test_where_everything_loses_too_much_nothing_is_chosen(texts, tmp_path):
    _, found, _ = run(texts, tmp_path, tolerance=1e-6)
    assert found.chosen is None
    assert all(trial.held_out is None for trial in found.trials)


@pytest.fixture
def server(monkeypatch):
    fake = FakeServer()
    for name in ("server.Server", "command.Client"):
        monkeypatch.setattr(f"sglang_xshare.tune.{name}", lambda url, *keys: fake)
    return fake


SMALL = ("--prompt", "8", "--tokens", "8", "--samples", "12")


def tune(texts, out, *more, settings=SETTINGS):
    flags = ["--texts", str(texts), "--out", str(out), *SMALL]
    return main(["tune", "http://fake", *settings, *flags, *(more or ("--tolerance", "5%"))])


def test_the_command_leaves_a_plan_that_the_server_takes(texts, tmp_path, server, capsys):
    assert tune(texts, tmp_path / "out", "--tolerance", "5%", "--batches", "4", "16") == 0
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert plan == {name: value for name, value in report["policy"].items() if name != "policy"}
    assert plan["by_rows"].keys() == {"2-4"}
    server.set_policy({"policy": "xshare", **plan})
    for batch in report["batches"]:
        chosen = batch["trials"][batch["chosen"]]
        active = server._count(batch["batch"])
        assert sum(active.get(layer, 40) for layer in WEIGHTS) / 4 == chosen["experts"]
    out = capsys.readouterr().out
    assert "sglang-xshare policy set http://fake xshare --config" in out
    for batch in report["batches"]:
        chosen = batch["trials"][batch["chosen"]]
        assert batch["greedy_agreement"] == chosen["held_out_agreement"] == 1
        loss = chosen["held_out"]
        assert batch["interval_within_tolerance"] == (loss["delta"] + 1.96 * loss["error"] <= batch["tolerance_nats"])
        assert f"{batch['batch']} rows, held-out samples: {chosen['held_out_experts']:.1f} active experts in" in out
        assert "greedy agreement 100.0%; loss +" in out
    unsure = [batch for batch in report["batches"] if not batch["interval_within_tolerance"]]
    assert out.count("which reaches past") == len(unsure)


def test_the_server_has_its_own_policy_again(texts, tmp_path, server, monkeypatch):
    assert tune(texts, tmp_path / "out") == 0
    assert server.policy == {"policy": "xshare"}
    monkeypatch.setattr("sglang_xshare.tune.search.search", lambda *args: os.kill(os.getpid(), signal.SIGTERM))
    server.policy = {"policy": "oea", "k0": 3}
    assert tune(texts, tmp_path / "other") == 130
    assert server.policy == {"policy": "oea", "k0": 3}


@pytest.mark.parametrize("batch", [1, 2, 9, 40])
def test_another_who_switches_is_noticed_and_has_the_last_word(texts, tmp_path, server, capsys, batch):
    """Whenever it happens, also between two measurements; what was measured before is kept, and nothing after."""
    batches = 0
    other = {"policy": "oea", "k0": 5}

    def intrude(fake):
        nonlocal batches
        batches += 1
        if batches == batch:
            fake.set_policy(other)

    server.intrude = intrude
    assert tune(texts, tmp_path / "out", "--tolerance", "5%", "--batches", "4") == 1
    err = capsys.readouterr().err
    assert err.startswith("tune: http://fake: somebody else has switched its policy (switch ")
    assert err.endswith(f"the same command goes on from {tmp_path / 'out'}\n")
    assert err.count("\n") == 1
    assert server.policy == other
    assert server.switched[-1] == other
    assert not (tmp_path / "out" / "plan.json").exists()
    trace = tmp_path / "out" / "trace.jsonl"
    kept = trace.read_text() if trace.exists() else ""
    assert len(kept.splitlines()) == (batch - 1) // 3  # of twelve samples, four at a time
    server.intrude = lambda fake: None
    assert tune(texts, tmp_path / "out", "--tolerance", "5%", "--batches", "4") == 0
    assert trace.read_text().startswith(kept)
    assert tune(texts, tmp_path / "alone", "--tolerance", "5%", "--batches", "4") == 0
    plans = [json.loads((tmp_path / name / "plan.json").read_text()) for name in ("out", "alone")]
    assert plans[0] == plans[1]


def test_a_switch_that_was_interrupted_is_undone(server):
    """The server may have switched when Ctrl-C ended the wait for its answer."""

    def switch(policy):
        FakeServer.set_policy(server, policy)
        server.set_policy = lambda policy: FakeServer.set_policy(server, policy)
        raise KeyboardInterrupt

    hold = Hold(server)
    server.set_policy = switch
    with pytest.raises(KeyboardInterrupt):
        hold.set_policy({"policy": "oea", "k0": 3})
    hold.restore()
    assert server.policy == {"policy": "xshare"}


def test_of_two_that_begin_at_once_one_holds_the_server(server):
    """Both have found no trial; the first asks just before the second does."""
    first, second, ask = Hold(server), Hold(server), server.set_policy

    def intrude(policy):
        server.set_policy = ask
        first.set_policy({"policy": "oea", "k0": 3})
        return ask(policy)

    server.set_policy = intrude
    with pytest.raises(Switched):
        second.set_policy({"policy": "oea", "k0": 2})
    assert not second.restore()
    assert (server.policy, server.trial) == ({"policy": "oea", "k0": 3}, True)
    first.set_policy({"policy": "oea", "k0": 1})
    assert first.restore()
    assert (server.policy, server.trial) == ({"policy": "xshare"}, False)


def test_what_others_switch_just_before_is_left_so(server):
    """Between a look at the server and the question that follows it."""
    ask, own = server.set_policy, {"policy": "oea", "k0": 5}

    def intrude(policy):
        server.set_policy = ask
        ask(own)
        return ask(policy)

    hold = Hold(server)
    hold.set_policy({"policy": "oea", "k0": 3})
    server.set_policy = intrude
    with pytest.raises(Switched):
        hold.set_policy({"policy": "oea", "k0": 2})
    assert not hold.restore()
    hold = Hold(server)
    hold.set_policy({"policy": "oea", "k0": 3})
    server.set_policy = intrude
    assert not hold.restore()
    assert (server.policy, server.trial) == (own, False)


def test_an_answer_that_never_came_is_undone(server):
    def ask(policy):
        FakeServer.set_policy(server, policy)
        server.set_policy = lambda policy: FakeServer.set_policy(server, policy)
        raise PolicyError("no answer (timed out)")

    hold = Hold(server)
    server.set_policy = ask
    with pytest.raises(PolicyError, match="timed out"):
        hold.set_policy({"policy": "oea", "k0": 3})
    assert hold.restore()
    assert (server.policy, server.trial) == ({"policy": "xshare"}, False)


def test_an_interval_beyond_the_tolerance_is_said(texts, tmp_path, server, capsys):
    """A tolerance just above the loss that was found with a wider one."""
    assert tune(texts, tmp_path / "out", "--tolerance", "40%") == 0
    assert "reaches past" not in capsys.readouterr().out
    [batch] = json.loads((tmp_path / "out" / "report.json").read_text())["batches"]
    chosen = batch["trials"][batch["chosen"]]
    assert batch["interval_within_tolerance"]
    spent = max(chosen["loss"]["delta"], chosen["held_out"]["delta"]) / batch["cross_entropy"]
    assert tune(texts, tmp_path / "out", "--tolerance", str(spent * 1.0001)) == 0
    [batch] = json.loads((tmp_path / "out" / "report.json").read_text())["batches"]
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
        (("--tolerance", "-3%"), "--tolerance -3%:"),
        (("--tolerance", "0"), "--tolerance 0:"),
        (("--tolerance", "1%", "--batches", "0"), "--batches 0:"),
        (("--tolerance", "1%", "--groups", "x"), "--groups x:"),
        (("--tolerance", "1%", "--samples", "1"), "--samples 1:"),
    ],
)
def test_wrong_flags_are_one_line(texts, tmp_path, server, capsys, flags, message):
    with pytest.raises(SystemExit) as ended:
        tune(texts, tmp_path / "out", *flags)
    err = capsys.readouterr().err
    assert message in err
    assert (ended.value.code, err.count("\n")) == (1, 1)


@pytest.mark.parametrize(("policy", "message"), [("vanilla", "'vanilla': "), ("xshare:k0=x", "k0 = 'x'")])
def test_a_setting_that_is_none_is_one_line(texts, tmp_path, server, capsys, policy, message):
    with pytest.raises(SystemExit):
        tune(texts, tmp_path / "out", settings=[policy])
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--samples 900", "--samples 900: --texts {texts}/0.txt has 464 "),
        ("--batches 4 99", "--batches 99: "),
        ("--prompt 5000", "--prompt 5000: --texts {texts}/0.txt has 7,904 "),
        ("--tokens 5000", "--tokens 5000: --texts {texts}/0.txt has 7,904 "),
    ],
)
def test_the_flag_that_asks_for_more_than_there_is_is_named(flags, line, texts, tmp_path, server, capsys):
    assert tune(texts, tmp_path / "out", "--tolerance", "5%", *flags.split()) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"tune: {line.format(texts=texts)}")
    assert (err.count("\n"), server.switched) == (1, [])


def test_a_setting_that_the_model_cannot_have_is_refused_first(texts, tmp_path, server, capsys):
    assert tune(texts, tmp_path / "out", settings=["xshare:k0=1,add=2", "xshare:k0=99"]) == 1
    assert read_refusal(capsys).startswith("tune: POLICY xshare:k0=99: k0 = 99: ")
    assert (server.switched, (tmp_path / "out").exists()) == ([], False)


def test_what_the_server_left_exact_stays_so_in_the_plan(texts, tmp_path, server):
    server.policy = {"policy": "oea", "k0": 3, "exact": {"priority": 10}}
    assert tune(texts, tmp_path / "out") == 0
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert plan["exact"] == {"priority": 10}
    assert "min_rows" not in plan


def test_a_trial_is_never_put_back(texts, tmp_path, server, capsys):
    """Two runs side by side: the second begins between two measurements of the first, which ends well."""
    own = {"policy": "oea", "k0": 3}
    server.policy = own
    second: list[int] = []

    def begin(fake):
        fake.intrude = lambda fake: None
        second.append(tune(texts, tmp_path / "second"))

    server.intrude = begin
    assert tune(texts, tmp_path / "first") == 0
    out, err = capsys.readouterr()
    assert second == [1]
    assert err.startswith("tune: http://fake: its policy is another search's trial")
    assert (server.policy, server.trial) == (own, False)
    assert "At the end it puts back: oea:k0=3\n" in out
    assert "\nPut back: oea:k0=3\n" in out


def test_a_policy_may_stand_behind_flags(texts, tmp_path, server, capsys):
    mixed = ["--texts", str(texts), SETTINGS[1], "--tolerance", "5%", SETTINGS[2], "--out", str(tmp_path / "out")]
    assert main(["tune", "http://fake", *mixed, *SMALL]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    tried = {one["name"] for options in report["batches"][0]["options"].values() for one in options}
    assert tried <= {VANILLA_SETTING, *SETTINGS[1:3]}


def test_a_trace_of_other_samples_is_refused(texts, tmp_path, server, capsys):
    assert tune(texts, tmp_path / "out") == 0
    assert tune(texts, tmp_path / "out", "--tolerance", "5%", "--samples", "24") == 1
    assert "begun with other samples" in capsys.readouterr().err
    (texts / "0.txt").write_bytes((texts / "0.txt").read_bytes()[5:])
    assert tune(texts, tmp_path / "out") == 1


def test_graphs_that_follow_no_switch_are_refused(texts, tmp_path, server, capsys):
    server.captured, server.policy = True, {"policy": "observe"}
    assert tune(texts, tmp_path / "out") == 1
    err = capsys.readouterr().err
    assert "captured under observe" in err
    assert "--expert-policy 'xshare:k0=1,add=1,utility=squared,own_share=0.75'" in err


def test_a_trace_of_other_figures_is_refused(texts, tmp_path, server, capsys):
    """As one of a version before divergences."""
    assert tune(texts, tmp_path / "out") == 0
    asked = json.loads((tmp_path / "out/asked.json").read_text())
    del asked["figures"]
    (tmp_path / "out/asked.json").write_text(json.dumps(asked))
    assert tune(texts, tmp_path / "out") == 1
    assert "begun with other figures" in capsys.readouterr().err
    (tmp_path / "out/asked.json").write_text("[]")
    assert tune(texts, tmp_path / "out") == 1
    assert "asked.json: a JSON list" in capsys.readouterr().err


def test_where_experts_are_paged_all_is_told_of_page_ins(texts, tmp_path, server, capsys):
    server.paged = True
    assert tune(texts, tmp_path / "out") == 0
    assert "page-ins in place of 4.0" in " ".join(capsys.readouterr().out.split())
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["batches"][0]["counted"] == "page-ins"
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert plan["min_rows"] == 2, "one row was not measured"
    server.paged = False
    assert tune(texts, tmp_path / "out") == 1
    assert "begun with other counted" in capsys.readouterr().err
