"""The search for the settings with the fewest experts and a tolerated loss.

It measures settings in each group of layers, ranks choices of settings, and finds the last choice with a tolerated
loss.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean

from .measure import Bench, Loss, agreement, compare
from .plans import VANILLA_SETTING, Layers, build_policy, name_layers

Tell = Callable[[str], None]
ACTIVE, PAGED = "active experts", "page-ins"
"""The units of savings. Page-ins are the unit if the server pages experts."""


@dataclass(frozen=True)
class Option:
    """A setting of one group of layers.

    `loss` is the divergence from vanilla in nats per token. `experts` is the number of experts minus vanilla's number.
    """

    name: str
    loss: float
    experts: float


def smooth(options: Sequence[Option]) -> list[Option]:
    """Return the options sorted by falling number of experts, with losses that never fall.

    If errors make a loss fall, the neighbouring options share their mean (pool adjacent violators). No loss is below 0.
    """
    pools: list[list[Option]] = []
    for option in sorted(options, key=lambda one: -one.experts):
        pools.append([option])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [Option(one.name, max(_mean(pool), 0.0), one.experts) for pool in pools for one in pool]


def trim(options: Sequence[Option]) -> list[Option]:
    """Return the smoothed options on the lower convex hull of the points (experts, loss).

    For any other option, a mix of these options has the same number of experts and no more loss.
    """
    hull: list[Option] = []
    for option in options:
        if hull and option.experts == hull[-1].experts:
            continue
        while len(hull) > 1 and _price(hull[-1], option) < _price(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def rank_choices(groups: Mapping[str, Sequence[Option]]) -> list[dict[str, Option]]:
    """Return a list of choices, each with one option for every group.

    The first choice has the first option of every group, and the last choice has the last. From one choice to the next,
    only one group moves to its next option: the group whose move adds the smallest loss for each saved expert. If the
    options are trimmed, each choice has the smallest sum of losses among all choices with at most as many experts.
    """
    moves = [(_price(*pair), group, pair[1]) for group, options in groups.items() for pair in pairwise(options)]
    choice = {group: options[0] for group, options in groups.items()}
    choices = [choice]
    for _, group, option in sorted(moves, key=lambda move: move[0]):
        choices.append({**choices[-1], group: option})
    return choices


def _price(one: Option, next: Option) -> float:
    """Return the additional loss in nats for each expert that the option `next` saves."""
    return (next.loss - one.loss) / (one.experts - next.experts)


def _mean(pool: Sequence[Option]) -> float:
    return sum(one.loss for one in pool) / len(pool)


@dataclass(frozen=True)
class Trial:
    """A setting for every group, with its predicted and its measured loss in nats per token.

    `experts` is the mean number in a layer and step, including vanilla layers. `agreement` is the share of tokens for
    which vanilla makes the same choice. The last three fields are the figures on the held-out samples. They are None if
    `loss` exceeds the tolerance.
    """

    settings: dict[Layers, str]
    predicted: float
    loss: Loss
    experts: float
    kept_mass: float | None
    agreement: float
    held_out: Loss | None = None
    held_out_experts: float | None = None
    held_out_agreement: float | None = None


@dataclass
class Found:
    """The result for one batch size.

    `chosen` is None if no trial is within the tolerance. `tolerance` is in nats per token. `unit` names the unit that
    is counted. `before` is vanilla's count in a layer and step.
    """

    batch: int
    tolerance: float
    cross_entropy: float
    before: float
    options: dict[Layers, list[Option]]
    unit: str = ACTIVE
    trials: list[Trial] = field(default_factory=list)
    chosen: Trial | None = None

    def fits(self, trial: Trial) -> bool:
        """Return whether a trial's loss is within the tolerance, also on the held-out samples."""
        return trial.held_out is not None and max(trial.loss.delta, trial.held_out.delta) <= self.tolerance

    @property
    def is_sure(self) -> bool:
        """Return whether the whole interval of the chosen trial's held-out loss is within the tolerance."""
        held_out = None if self.chosen is None else self.chosen.held_out
        return held_out is not None and held_out.interval[1] <= self.tolerance


def count_measurements(groups: int, settings: int) -> int:
    """Estimate the number of measurements in a search.

    The search measures vanilla on both parts, one setting in all groups, each setting in each group, and the trials.
    """
    singles = groups * settings
    return 3 + singles + 2 * math.ceil(math.log2(singles + 1))


def search(
    bench: Bench,
    groups: Sequence[Layers],
    settings: Sequence[str],
    batch: int,
    tolerance: float,
    tell: Tell,
    unit: str = ACTIVE,
) -> Found:
    """Find the settings with the fewest experts within the tolerance, at one batch size.

    `tolerance` is a share of vanilla's cross-entropy. `unit` names the unit that the bench counts. The search first
    measures a setting in all groups, to count vanilla's active experts. It uses the first setting that changes
    anything. Then it measures each setting in each group alone. Finally it measures choices of settings, and finds the
    last choice within the tolerance by bisection.
    """
    vanilla = bench.run({"policy": VANILLA_SETTING}, batch, "tuning")
    everywhere = (bench.run(build_policy(dict.fromkeys(groups, one)), batch, "tuning").before for one in settings)
    before = next((count for count in everywhere if count is not None), 0.0)
    options: dict[Layers, list[Option]] = {}
    for group in groups:
        measured = []
        for setting in settings:
            alone = {other: setting if other == group else VANILLA_SETTING for other in groups}
            one = bench.run(build_policy(alone), batch, "tuning")
            if one.saved is None:
                continue  # the setting cannot change anything at this batch size
            loss, saved = fmean(one.divergences), one.saved / len(group)
            measured.append(Option(setting, loss, -one.saved))
            told = f"{saved:.1f} {unit} saved a layer, {loss:.4f} nats of divergence"
            tell(f"layers {name_layers(group)}, {setting}: {told}")
        options[group] = smooth(
            [Option(VANILLA_SETTING, 0.0, 0.0), *(option for option in measured if option.experts < 0)]
        )
    tolerated = tolerance * vanilla.cross_entropy
    found = Found(batch, tolerated, vanilla.cross_entropy, before, options, unit)
    choices = rank_choices({name_layers(group): trim(some) for group, some in options.items()})
    fitting, beyond = 0, len(choices)  # the first choice is vanilla everywhere
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        trial = _try(bench, found, choices[middle], tell)
        found.trials.append(trial)
        if found.fits(trial):
            fitting, found.chosen = middle, trial
        else:
            beyond = middle
    return found


def _try(bench: Bench, found: Found, choice: dict[str, Option], tell: Tell) -> Trial:
    """Measure a choice.

    The held-out samples are measured only if the loss on the other samples is within the tolerance.
    """
    settings = {group: choice[name_layers(group)].name for group in found.options}
    predicted = sum(one.loss for one in choice.values())
    trial = _measure(bench, found, settings, predicted, "tuning")
    loss = trial.loss
    tell(f"together: {trial.experts:.1f} {found.unit}, {loss.delta:+.4f} nats ({predicted:.4f} predicted)")
    if loss.delta > found.tolerance:
        return trial
    other = _measure(bench, found, settings, predicted, "held out")
    loss, (low, high) = other.loss, other.loss.interval
    tell(f"held out: {other.experts:.1f} {found.unit}, {loss.delta:+.4f} nats, 95 % [{low:.4f}, {high:.4f}]")
    return replace(trial, held_out=loss, held_out_experts=other.experts, held_out_agreement=other.agreement)


def _measure(bench: Bench, found: Found, settings: dict[Layers, str], predicted: float, part: str) -> Trial:
    """Measure settings on one part of the samples."""
    measured = bench.run(build_policy(settings), found.batch, part)
    vanilla = bench.run({"policy": VANILLA_SETTING}, found.batch, part)
    experts = found.before - (measured.saved or 0.0) / sum(map(len, found.options))
    loss, same = compare(measured, vanilla), agreement(measured, vanilla)
    return Trial(settings, predicted, loss, experts, measured.kept_mass, same)
