"""The choice of settings: losses that rise as experts fall, and the order in which groups give experts up."""

from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_xshare.tune.search import Option, rank_choices, smooth, trim

few = settings(max_examples=60, deadline=None)
losses = st.floats(-1, 10, allow_nan=False)
experts = st.integers(0, 64).map(float)
group = st.lists(st.builds(Option, st.just("x"), losses, experts), max_size=4).map(
    lambda options: [Option("vanilla", 0.0, 64.0), *options]
)


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


def test_each_choice_moves_one_group_on():
    groups = {
        "0": [Option("a", 0, 9), Option("b", 3, 1)],
        "1": [Option("a", 0, 9), Option("b", 1, 5), Option("c", 5, 1)],
    }
    names = ["".join(one.name for one in choice.values()) for choice in rank_choices(groups)]
    assert names == ["aa", "ab", "bb", "bc"]


def total(name, options):
    return sum(getattr(one, name) for one in options)
