"""Paged experts, served side by side: which servers, and a round for real."""

import pytest

from benchmark.common.paths import TRAINED
from benchmark.common.record import read_record
from benchmark.paged import live
from benchmark.paged.report import OBSERVED, UNIFORM, VANILLA, key_of, quality_key


def test_the_policies_and_observe_share_a_server_and_the_baseline_comes_first():
    variants = live.list_variants(UNIFORM[:2], slots=32)
    assert [one.name for one in variants][:3] == [VANILLA, "vanilla, all in memory", UNIFORM[0]]
    paged = [one for one in variants if one.args[-1:] == ("32",)]
    assert [one.policy for one in paged] == [None, "xshare", "xshare", "observe"]
    whole, everything = variants[4:6]
    assert (whole.args, everything.args[-1]) == ((), str(live.MOST))
    assert whole.keys == everything.keys == paged[1].keys
    assert live._judged(variants) == ["vanilla, all in memory", *UNIFORM[:2], OBSERVED]


@pytest.mark.long
def test_a_round_for_real_and_nothing_more_when_it_is_resumed(tmp_path, monkeypatch):
    sizes = ["--rounds", "1", "--requests", "4", "--concurrency", "4", "--output-tokens", "8"]
    sizes += ["--per-domain", "2", "--loss-tokens", "8", "--sums", "4", "--slots", "16"]
    arguments = [UNIFORM[0], "--model", str(TRAINED), *sizes, "--out", str(tmp_path)]
    # In bfloat16 the kernels of the two servers round differently, by up to 9e-4 nats a text where the CPU has AMX.
    monkeypatch.setattr(live, "SERVER_ARGS", (*live.SERVER_ARGS, "--dtype", "float32"))
    live.main(arguments)
    points = read_record(tmp_path / "live.json", "live")["points"]
    series = {one["variant"]["name"]: one for one in points[key_of(4)]["series"]}
    assert len(series) == 5
    (counted,) = series[UNIFORM[0]]["evidence"]
    assert 0 < counted["page_ins"] < counted["page_ins_before"]
    everything = series[f"{UNIFORM[0]}, slots for all"]["evidence"][0]
    assert everything["page_ins"] is None
    assert everything["experts_after"] == series[f"{UNIFORM[0]}, all in memory"]["evidence"][0]["experts_after"]
    observed, whole = (points[quality_key(4, name)] for name in (OBSERVED, "vanilla, all in memory"))
    assert observed["nats"] == pytest.approx(whole["nats"], abs=1e-4)
    assert observed["page_ins"] == observed["before"] > points[quality_key(4, UNIFORM[0])]["page_ins"]
    monkeypatch.setattr(live, "serve", lambda *_: pytest.fail("served again"))
    live.main([*arguments, "--resume"])
