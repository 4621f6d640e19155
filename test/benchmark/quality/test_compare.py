"""The comparison of policies: its baseline, and a record that is resumed."""

import pytest

from benchmark.quality.__main__ import main

COUNTS = ("--per-domain", "4", "--prompt", "8", "--steps", "12", "--batch", "4")


def test_vanilla_comes_first_and_is_the_baseline(measure):
    policies = "xshare:k0=1,add=2", "oea:k0=4"
    points = measure(main, "quality", *policies, "vanilla", *COUNTS)
    assert list(points) == ["vanilla", *policies]
    vanilla, harsh, full = points.values()
    for batches in ("one_domain", "mixed"):
        assert set(vanilla[batches]["loss"]) == {"all", "arithmetic", "prose"}
        assert (vanilla[batches]["loss"]["all"]["delta"], vanilla[batches]["agreement"]) == (0, 1)
        assert full[batches] == vanilla[batches]
        assert harsh[batches]["active_experts"] < vanilla[batches]["active_experts"]
        assert harsh[batches]["kept_mass"] < 1 == vanilla[batches]["kept_mass"]
        assert harsh[batches]["loss"]["all"]["delta"] != 0
        assert harsh[batches]["answers"] > 0
    # The same text either way, so vanilla's loss is the same; a policy's is not.
    one, mixed = (vanilla[name]["loss"]["prose"]["cross_entropy"] for name in ("one_domain", "mixed"))
    assert one == pytest.approx(mixed, rel=1e-5)
    assert harsh["one_domain"]["loss"]["prose"]["delta"] != harsh["mixed"]["loss"]["prose"]["delta"]
