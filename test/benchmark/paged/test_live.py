"""Paged experts, served side by side: which servers, what the table says of them, and a round for real."""

import pytest
from common.made_up import make_point, make_series

from benchmark.common.evidence import Evidence
from benchmark.common.paths import TRAINED
from benchmark.common.record import read_record
from benchmark.paged import live
from benchmark.paged.report import OBSERVED, UNIFORM, VANILLA, key_of, quality_key, tabulate_live


def test_the_policies_and_observe_share_a_server_and_the_baseline_comes_first():
    variants = live.list_variants(UNIFORM[:2], slots=32)
    assert [one.name for one in variants][:3] == [VANILLA, "vanilla, all in memory", UNIFORM[0]]
    paged = [one for one in variants if one.args[-1:] == ("32",)]
    assert [one.policy for one in paged] == [None, "xshare", "xshare", "observe"]
    whole, everything = variants[4:6]
    assert whole.args == ()
    assert everything.args[-1] == str(live.MOST)
    assert whole.keys == everything.keys == paged[1].keys
    assert live._judged(variants) == ["vanilla, all in memory", *UNIFORM[:2], OBSERVED]


def test_the_table_has_vanillas_own_page_ins_and_what_policies_saved():
    evidence = Evidence(40.0, 30.0, 0.95, 9, page_ins=4.0, page_ins_before=16.0)
    speeds = (100.0, 130.0, 250.0, 200.0, 390.0, 390.0)
    series = [
        make_series(variant, [speed] * 2, evidence)
        for variant, speed in zip(live.list_variants(UNIFORM[:2], 32), speeds, strict=False)
    ]
    points = {key_of(8): make_point(series, str(TRAINED), concurrency=8)}
    for name, nats in ((OBSERVED, [2.0, 3.0]), (UNIFORM[0], [2.1, 3.1])):
        points[quality_key(8, name)] = {"nats": nats, "sums": 0.75, "page_ins": 20.0, "before": 20.0}
    vanilla, _, policy, *_, everything = tabulate_live(points).rows
    assert vanilla == ["8", "vanilla, paged", "100", "1.00", "20.0", "2.500", "0.750"]
    assert policy[3:] == ["2.50", "16.0 -> 4.0", "+0.100 (one batch)", "0.750"]
    assert everything[1] == "xshare:k0=1,add=4, slots for all"
    assert everything[-2:] == ["-", "-"]


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
