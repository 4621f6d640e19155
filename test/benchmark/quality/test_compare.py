"""The comparison of policies: baseline, records, and what the command says of bad input."""

import json

import pytest

from benchmark.quality.__main__ import main
from benchmark.quality.compare import policy_quality
from benchmark.quality.decoding import Decoding


@pytest.fixture
def decoding(checkpoint):
    return Decoding(checkpoint, checkpoint / "heldout", per_domain=4, prompt=8, steps=12, batch=4)


def test_vanilla_comes_first_and_is_the_baseline(decoding):
    records = policy_quality(decoding, ["xshare:k0=1,add=2", "oea:k0=4", "vanilla"])
    measured = dict(records)
    assert list(measured) == ["vanilla", "xshare:k0=1,add=2", "oea:k0=4"]
    vanilla, harsh, full = measured.values()
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


def test_a_policy_that_does_not_fit_stops_before_any_is_measured(decoding, capsys):
    with pytest.raises(ValueError, match="k0 = 5:"):
        list(policy_quality(decoding, ["pruned:k0=5"]))
    assert capsys.readouterr().out == ""


COUNTS = ("--per-domain", "4", "--prompt", "8", "--steps", "12", "--batch", "4")


def test_command_writes_a_record(checkpoint, tmp_path, capsys):
    arguments = ["xshare:k0=1,add=2", "--model", str(checkpoint), *COUNTS, "--out", str(tmp_path)]
    main(arguments)
    record = json.loads((tmp_path / "quality.json").read_text())
    assert record["arguments"]["batch"] == 4
    assert list(record["points"]) == ["vanilla", "xshare:k0=1,add=2"]
    experts = record["points"]["xshare:k0=1,add=2"]["one_domain"]["active_experts"]
    printed = capsys.readouterr().out
    assert f" {experts:.1f} " in printed
    assert "one domain: loss, nats" in printed
    assert "mixed: loss, nats" in printed
    main([*arguments, "--resume"])
    assert json.loads((tmp_path / "quality.json").read_text()) == record
