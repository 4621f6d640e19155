"""The search: the loss of settings in each group of layers, the best choices, and the last choice within tolerance."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean

from .measure import Bench, Loss, agreement, compare
from .plans import VANILLA_SETTING, Layers, build_policy, name_layers

Tell = Callable[[str], None]
ACTIVE, PAGED = "active experts", "page-ins"
"""The units of a setting's savings: page-ins on a server that pages experts."""


@dataclass(frozen=True)
class Option:
    """A setting of one group of layers, its own loss (nats a token, by divergence), and its experts minus vanilla's."""

    name: str
    loss: float
    experts: float


def smooth(options: Sequence[Option]) -> list[Option]:
    """Return the options by falling experts, with losses that never fall and are never below 0.

    If measurement errors make a loss fall, these neighbours share their mean (pool adjacent violators).
    """
    pools: list[list[Option]] = []
    for option in sorted(options, key=lambda one: -one.experts):
        pools.append([option])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [Option(one.name, max(_mean(pool), 0.0), one.experts) for pool in pools for one in pool]


def trim(options: Sequence[Option]) -> list[Option]:
    """Return the smoothed options on the lower convex hull of loss by experts: a mix of these beats any other."""
    hull: list[Option] = []
    for option in options:
        if hull and option.experts == hull[-1].experts:
            continue
        while len(hull) > 1 and _price(hull[-1], option) < _price(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def rank_choices(groups: Mapping[str, Sequence[Option]]) -> list[dict[str, Option]]:
    """Return choices of one option for each group, from every group's first option to every group's last option.

    From choice to choice one group takes its next option: the group whose next option costs the least loss for each
    expert less. If options are trimmed, no other choice with as few experts has a smaller sum of losses.
    """
    moves = [(_price(*pair), group, pair[1]) for group, options in groups.items() for pair in pairwise(options)]
    choice = {group: options[0] for group, options in groups.items()}
    choices = [choice]
    for _, group, option in sorted(moves, key=lambda move: move[0]):
        choices.append({**choices[-1], group: option})
    return choices


def _price(one: Option, next: Option) -> float:
    """Return the nats that an option with fewer experts costs for each expert less."""
    return (next.loss - one.loss) / (one.experts - next.experts)


def _mean(pool: Sequence[Option]) -> float:
    return sum(one.loss for one in pool) / len(pool)


@dataclass(frozen=True)
class Trial:
    """A setting for every group, with its predicted and its measured loss in nats a token.

    `experts` are of a layer and step, vanilla layers included; `agreement` is the share of tokens for which vanilla's
    choice is the same. `held_out` is the loss on the held-out samples, with `held_out_experts` and
    `held_out_agreement`; None if `loss` was more than tolerated already.
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
    """The result for a batch size; `chosen` is None if every trial loses more than tolerated.

    `tolerance` is in nats a token. `unit` names what is counted, and `before` is vanilla's count in a layer and step.
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
        """Return whether a trial's loss is within the tolerance, on the held-out samples too."""
        return trial.held_out is not None and max(trial.loss.delta, trial.held_out.delta) <= self.tolerance

    @property
    def is_sure(self) -> bool:
        """Return whether the interval of the chosen trial's held-out loss is within the tolerance."""
        held_out = None if self.chosen is None else self.chosen.held_out
        return held_out is not None and held_out.interval[1] <= self.tolerance


def count_measurements(groups: int, settings: int) -> int:
    """Estimate a search's measurements: vanilla on both parts, one setting everywhere, each in each group, trials."""
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
    """Find the settings with the fewest experts at one batch size that lose at most `tolerance`.

    `tolerance` is a share of vanilla's cross-entropy. The search measures each setting in each group alone; in all
    groups, for vanilla's active experts, the first setting that changes anything; and choices of settings, by
    bisection. `unit` names what the bench counts.
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
    """Measure a choice; on the held-out samples only if its loss on the others is within the tolerance."""
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
    """Measure settings on a part of the samples."""
    measured = bench.run(build_policy(settings), found.batch, part)
    vanilla = bench.run({"policy": VANILLA_SETTING}, found.batch, part)
    experts = found.before - (measured.saved or 0.0) / sum(map(len, found.options))
    loss, same = compare(measured, vanilla), agreement(measured, vanilla)
    return Trial(settings, predicted, loss, experts, measured.kept_mass, same)
