"""The comparison of policies: spelling, baseline, records, and what the command says of bad input."""

import json
from dataclasses import replace

import pytest

from benchmark.common.plan import parse_plan
from benchmark.quality import __main__ as command
from benchmark.quality.compare import policy_quality
from benchmark.quality.report import family_of
from benchmark.quality.workload import Workload
from sglang_xshare import build_plan


@pytest.fixture
def workload(checkpoint):
    return Workload(checkpoint, checkpoint / "heldout", per_domain=4, prompt=8, steps=12, batch=4)


def test_spelling_is_the_servers():
    assert parse_plan("xshare:k0=2,add=12,utility=full") == build_plan("xshare", k0=2, add=12, utility="full")
    assert parse_plan('oea:{"k0": 3}') == build_plan("oea", k0=3)
    assert parse_plan("off") == parse_plan("vanilla") == build_plan("vanilla")


def test_without_keys_the_published_ones():
    assert parse_plan("xshare") == build_plan("xshare", k0=1, add=24)
    assert parse_plan("xshare", speculative=True) == build_plan("xshare", k0=1, add=0, add_per_request=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shareX", "policy 'shareX': allowed is NAME"),
        ("sharex", "policy = 'sharex': allowed is one of vanilla"),
        ("xshare:k0", "'k0' is no key=value"),
        ("xshare:k0=one", "k0 = 'one': allowed is an integer"),
        ("oea:add=3", "add = 3: oea has no such key"),
    ],
)
def test_misspelt(text, message):
    with pytest.raises(ValueError, match=message):
        parse_plan(text)


def test_vanilla_comes_first_and_is_the_baseline(workload):
    records = policy_quality(workload, ["xshare:k0=1,add=2", "oea:k0=4", "vanilla"])
    assert [record["policy"] for record in records] == ["vanilla", "xshare:k0=1,add=2", "oea:k0=4"]
    vanilla, harsh, full = ({name: record[name] for name in ("one_domain", "mixed")} for record in records)
    for batches in ("one_domain", "mixed"):
        assert set(vanilla[batches]["loss"]) == {"all", "arithmetic", "prose"}
        assert vanilla[batches]["loss"]["all"]["delta"] == 0
        assert vanilla[batches]["agreement"] == 1
        assert full[batches] == vanilla[batches]
        assert harsh[batches]["active_experts"] < vanilla[batches]["active_experts"]
        assert harsh[batches]["kept_mass"] < 1 == vanilla[batches]["kept_mass"]
        assert harsh[batches]["loss"]["all"]["delta"] != 0
        assert harsh[batches]["answers"] > 0
    # The same text either way, so vanilla's loss is the same; a policy's is not.
    one, mixed = (vanilla[name]["loss"]["prose"]["cross_entropy"] for name in ("one_domain", "mixed"))
    assert one == pytest.approx(mixed, rel=1e-5)
    assert harsh["one_domain"]["loss"]["prose"]["delta"] != harsh["mixed"]["loss"]["prose"]["delta"]


def test_all_is_the_mean_of_the_domains(workload):
    loss = policy_quality(workload, ["pruned:k0=2"])[1]["one_domain"]["loss"]
    assert loss["all"]["delta"] == pytest.approx((loss["arithmetic"]["delta"] + loss["prose"]["delta"]) / 2)


def test_a_policy_that_does_not_fit_stops_before_any_is_measured(workload, capsys):
    with pytest.raises(ValueError, match="k0 = 5: allowed is at most the model's top-k, 4"):
        policy_quality(workload, ["pruned:k0=5"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 3}, "per_domain = 4: allowed are multiples of batch = 3"),
        ({"tokens_per_request": 5}, "steps = 12: allowed are multiples of tokens_per_request = 5"),
        ({"prompt": 0}, "prompt = 0: allowed is a whole number above 0"),
    ],
)
def test_bad_workload(workload, change, message):
    with pytest.raises(ValueError, match=message):
        replace(workload, **change)


def run_command(monkeypatch, *args):
    monkeypatch.setattr("sys.argv", ["quality", *map(str, args)])
    command.main()


COUNTS = ("--per-domain", 4, "--prompt", 8, "--steps", 12, "--batch", 4)


def test_command_writes_record_and_plot(checkpoint, tmp_path, monkeypatch, capsys):
    run_command(monkeypatch, "xshare:k0=1,add=2", "--model", checkpoint, *COUNTS, "--out", tmp_path)
    record = json.loads((tmp_path / "quality.json").read_text())
    assert record["workload"]["batch"] == 4
    assert {"date", "hardware", "versions", "command"} <= set(record)
    experts = record["policies"][1]["one_domain"]["active_experts"]
    assert f" {experts:.1f} " in capsys.readouterr().out
    assert (tmp_path / "quality.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("sharex",), "policy = 'sharex': allowed is one of"),
        (("--model", "/nowhere"), "model /nowhere: no config.json there"),
        (("--batch", 5), "multiples of batch = 5"),
        (("--texts", "/nowhere"), "texts /nowhere: no"),
    ],
)
def test_command_tells_bad_input_in_one_line(checkpoint, args, message, monkeypatch):
    with pytest.raises(SystemExit) as stop:
        run_command(monkeypatch, "--model", checkpoint, *COUNTS, *args)
    text = str(stop.value.code)
    assert text.startswith("error: ")
    assert message in text
    assert "\n" not in text


def test_a_family_joins_what_differs_in_numbers():
    assert family_of("xshare:k0=1,add=8") == family_of("xshare") == "xshare"
    assert family_of("xshare:k0=1,add=8,utility=full") == "xshare utility=full"
