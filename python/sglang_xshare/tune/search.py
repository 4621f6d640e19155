"""The search: what settings cost in each group of layers, the best choices, and how far the tolerance lasts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean

from .measure import Bench, Loss, Measurement, agreement, compare
from .plans import VANILLA_SETTING, Layers, build_policy, name_layers

Tell = Callable[[str], None]
ACTIVE, PAGED = "active experts", "page-ins"
"""What a setting saves: where experts are paged in over a link, those that are."""


@dataclass(frozen=True)
class Option:
    """A setting of one group of layers: what it loses alone, in nats a token, of which divergence is the estimate, and
    how many experts of a step are active, above or below vanilla.
    """

    name: str
    loss: float
    experts: float


def smooth(options: Sequence[Option]) -> list[Option]:
    """The options by falling experts, with losses that never fall and are never below 0: those that stand the wrong way
    round, by their errors, share their mean (pool adjacent violators).
    """
    pools: list[list[Option]] = []
    for option in sorted(options, key=lambda one: -one.experts):
        pools.append([option])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [Option(one.name, max(_mean(pool), 0.0), one.experts) for pool in pools for one in pool]


def trim(options: Sequence[Option]) -> list[Option]:
    """Smoothed options on the lower convex hull: what lies above the line between two others is not worth its loss."""
    hull: list[Option] = []
    for option in options:
        if hull and option.experts == hull[-1].experts:
            continue
        while len(hull) > 1 and _price(hull[-1], option) < _price(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def rank_choices(groups: Mapping[str, Sequence[Option]]) -> list[dict[str, Option]]:
    """Choices of an option for each group, from all first to all last: each moves one group on to its next option,
    that whose experts cost least. The options of a group must be trimmed: then none with as few experts has a smaller
    sum of losses, and losses rise along the choices.
    """
    moves = [(_price(*pair), group, pair[1]) for group, options in groups.items() for pair in pairwise(options)]
    choice = {group: options[0] for group, options in groups.items()}
    choices = [choice]
    for _, group, option in sorted(moves, key=lambda move: move[0]):
        choices.append({**choices[-1], group: option})
    return choices


def _price(one: Option, next: Option) -> float:
    """Nats an expert, from an option to one with fewer experts."""
    return (next.loss - one.loss) / (one.experts - next.experts)


def _mean(pool: Sequence[Option]) -> float:
    return sum(one.loss for one in pool) / len(pool)


@dataclass(frozen=True)
class Trial:
    """A setting for every group, what it was predicted to lose and what it lost, in nats a token, and its experts of a
    layer and step, vanilla layers included; `agreement` is the share of tokens for which vanilla's choice is the same.
    `held_out` is what it lost on the held-out samples, with `held_out_experts` and `held_out_agreement`; None where it
    lost more than tolerated already.
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
    """What was found for a batch size. `tolerance` in nats a token, `before` vanilla's experts of a layer and step,
    of the `unit` that all are of. `chosen` is None where nothing loses as little as tolerated.
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
        """Whether it lost as little as tolerated, on the held-out samples too."""
        return trial.held_out is not None and max(trial.loss.delta, trial.held_out.delta) <= self.tolerance

    @property
    def is_sure(self) -> bool:
        """Whether the chosen one's loss on the held-out samples is within the tolerance with all of its interval."""
        return (
            self.chosen is not None
            and self.chosen.held_out is not None
            and (self.chosen.held_out.interval[1] <= self.tolerance)
        )


def count_measurements(groups: int, settings: int) -> int:
    """About how many `search` makes: vanilla on both halves, one setting everywhere, each in each group, and trials."""
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
    """Find the settings with the fewest experts at one batch size, with at most `tolerance` (a share of vanilla's
    cross-entropy) lost. Measures every setting once a group, the first that changes anything everywhere, which tells
    what vanilla has active, and choices of settings, of which it halves the number that is left each time. `unit` names
    what the bench counts.
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
                continue  # it cannot change anything at this batch size
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
    """Measure a choice, on the held-out samples only where it loses as little as tolerated on the others."""
    settings = {group: choice[name_layers(group)].name for group in found.options}
    predicted = sum(one.loss for one in choice.values())
    measured, vanilla = _run(bench, found, settings, "tuning")
    loss, experts = compare(measured, vanilla), _count_experts(measured, found)
    trial = Trial(settings, predicted, loss, experts, measured.kept_mass, agreement(measured, vanilla))
    tell(f"together: {experts:.1f} {found.unit}, {loss.delta:+.4f} nats ({predicted:.4f} predicted)")
    if loss.delta > found.tolerance:
        return trial
    measured, vanilla = _run(bench, found, settings, "held out")
    loss, experts = compare(measured, vanilla), _count_experts(measured, found)
    low, high = loss.interval
    tell(f"held out: {experts:.1f} {found.unit}, {loss.delta:+.4f} nats, 95 % [{low:.4f}, {high:.4f}]")
    same = agreement(measured, vanilla)
    return replace(trial, held_out=loss, held_out_experts=experts, held_out_agreement=same)


def _run(bench: Bench, found: Found, settings: dict[Layers, str], part: str) -> tuple[Measurement, Measurement]:
    """What the settings do on a part of the samples, and what vanilla does there."""
    return bench.run(build_policy(settings), found.batch, part), bench.run(
        {"policy": VANILLA_SETTING}, found.batch, part
    )


def _count_experts(measured: Measurement, found: Found) -> float:
    """Of a layer and step, vanilla ones included."""
    return found.before - (measured.saved or 0.0) / sum(map(len, found.options))
