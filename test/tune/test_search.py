"""The search on a server whose losses are known: it spends the tolerance where it buys most, and resumes; choices."""

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_xshare.tune.gauge import Gauge
from sglang_xshare.tune.measure import Bench, Measurement
from sglang_xshare.tune.plans import VANILLA_SETTING, group_layers
from sglang_xshare.tune.search import Option, count_measurements, rank_choices, search, smooth, trim
from sglang_xshare.tune.texts import read_samples
from tune.fake import SETTINGS, WEIGHTS, FakeServer


def run(texts, tmp_path, tolerance=0.05, server=None, groups=4, settings=SETTINGS):
    server = server or FakeServer()
    tmp_path.mkdir(exist_ok=True)
    parts = dict(zip(("tuning", "held out"), read_samples(texts, server.tokenize, 8, 8, 12), strict=True))
    bench = Bench(Gauge(server, parts), tmp_path / "trace.jsonl")
    told: list[str] = []
    return bench, search(bench, group_layers(list(WEIGHTS), groups), settings, 4, tolerance, told.append), told


def test_layers_that_lose_little_give_most(texts, tmp_path):
    bench, found, told = run(texts, tmp_path)
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
    assert all(max(one.loss.delta, spent) > found.tolerance for one in tighter)
    closest = min(tighter, key=lambda one: found.chosen.experts - one.experts)
    changed = [group for group in closest.settings if closest.settings[group] != found.chosen.settings[group]]
    assert len(changed) == 1


@pytest.mark.parametrize("groups", [4, 2])
def test_more_is_tolerated_fewer_experts_are_left(texts, tmp_path, groups):
    shares = (0.01, 0.03, 0.1, 0.4)
    experts = [run(texts, tmp_path / str(share), share, groups=groups)[1].chosen.experts for share in shares]
    assert experts == sorted(experts, reverse=True)
    assert experts[-1] == 8


@pytest.mark.parametrize(
    "other",
    [
        {"server": FakeServer(captured=True)},
        {"settings": ("xshare:k0=1,add=32", *SETTINGS)},
        {"server": FakeServer(captured=True), "settings": ("xshare:k0=1,add=32", *SETTINGS)},
    ],
    ids=["vanilla layers count", "no drop", "vanilla layers count without a drop"],
)
def test_what_changes_nothing_saves_nothing(texts, tmp_path, other):
    """Graphs count layers that are vanilla. A setting that changes nothing is not run, and nothing is counted."""
    assert run(texts, tmp_path, **other)[1] == run(texts, tmp_path / "other")[1]


@pytest.mark.parametrize("rows", [0.5, 1.5])
def test_a_server_whose_steps_have_other_rows_is_refused(texts, tmp_path, rows):
    with pytest.raises(ValueError, match=f"^{4 * rows} rows a step in place of 4"):
        run(texts, tmp_path, server=FakeServer(rows=rows))


def test_half_a_line_in_the_trace_is_measured_again(texts, tmp_path):
    first = run(texts, tmp_path)[1]
    trace = tmp_path / "trace.jsonl"
    trace.write_text(trace.read_text()[:-20])
    bench, again, _ = run(texts, tmp_path)
    assert (bench.measured, again) == (1, first)


def test_a_measurement_is_known_by_policy_batch_and_part(tmp_path):
    asked = []
    measured = Measurement([1.0], [0.0], [[1]], None, None, None)
    bench = Bench(lambda *what: asked.append(what) or measured, tmp_path / "trace.jsonl")
    every = list(product(({"policy": "vanilla"}, {"policy": "oea"}), (4, 16), ("tuning", "held out")))
    for what in every * 2:
        bench.run(*what)
    assert asked == every


def test_losses_that_do_not_add_up_are_corrected(texts, tmp_path):
    _, found, _ = run(texts, tmp_path, server=FakeServer(synergy=0.01))
    assert found.chosen.predicted < found.chosen.loss.delta <= found.tolerance


def test_where_held_out_samples_lose_more_less_is_allowed(texts, tmp_path):
    held_out = read_samples(texts, FakeServer().tokenize, 8, 8, 12)[1]
    _, found, _ = run(texts, tmp_path, tolerance=0.1, server=FakeServer(harder=[one.prompt for one in held_out]))
    assert found.chosen.loss.delta < 0.8 * found.tolerance
    assert 0.5 * found.tolerance < found.chosen.held_out.delta <= found.tolerance


def test_where_everything_loses_too_much_nothing_is_chosen(texts, tmp_path):
    _, found, _ = run(texts, tmp_path, tolerance=1e-6)
    assert found.chosen is None
    assert all(trial.held_out is None for trial in found.trials)


few = settings(max_examples=60, deadline=None)
losses = st.floats(-1, 10, allow_nan=False)
experts = st.integers(0, 64).map(float)
others = st.lists(st.builds(Option, st.just("x"), losses, experts), max_size=4)
group = others.map(lambda options: [Option("vanilla", 0.0, 64.0), *options])


@few
@given(st.lists(st.builds(Option, st.text(), losses, experts), min_size=1, max_size=8))
def test_losses_rise_as_experts_fall(options):
    smoothed = smooth(options)
    assert [one.experts for one in smoothed] == sorted((one.experts for one in options), reverse=True)
    found = [one.loss for one in smoothed]
    assert found == sorted(found)
    assert min(found) >= 0


@few
@given(group)
def test_what_is_trimmed_lies_above_the_line(options):
    kept = trim(smooth(options))
    prices = [(other.loss - one.loss) / (one.experts - other.experts) for one, other in pairwise(kept)]
    assert prices == sorted(prices)
    assert kept[0].loss == 0
    for option in smooth(options):
        for one, other in pairwise(kept):
            if one.experts >= option.experts >= other.experts:
                share = (one.experts - option.experts) / (one.experts - other.experts)
                assert option.loss >= one.loss + share * (other.loss - one.loss) - 1e-9


@few
@given(st.dictionaries(st.sampled_from("abc"), group, min_size=1))
def test_no_choice_with_as_few_experts_loses_less(groups):
    groups = {name: trim(smooth(options)) for name, options in groups.items()}
    ranked = rank_choices(groups)
    assert len(ranked) == 1 + sum(len(options) - 1 for options in groups.values())
    assert ranked[0] == {name: options[0] for name, options in groups.items()}
    assert ranked[-1] == {name: options[-1] for name, options in groups.items()}
    every = [(total("experts", one), total("loss", one)) for one in product(*groups.values())]
    for choice in ranked:
        experts, loss = total("experts", choice.values()), total("loss", choice.values())
        assert loss <= min(other for count, other in every if count <= experts + 1e-9) + 1e-9


def total(name, options):
    return sum(getattr(one, name) for one in options)
