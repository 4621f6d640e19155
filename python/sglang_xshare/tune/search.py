"""The search: what each setting costs in each group of layers alone, a choice that should add up, and what it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .choose import Option, choose, smooth
from .measure import Bench, Loss, Measurement, agreement, compare
from .plans import VANILLA, Layers, build_policy, name_layers

TRIALS = 5
"""Choices tried for a batch size: each corrects the tolerance by what the last one lost."""
ROUNDS = 4
"""Times it tries, allowing less where what was chosen lost more than tolerated on the held-out samples."""
NEAR = 0.85
"""A loss of this share of the tolerance is near enough."""


@dataclass(frozen=True)
class Trial:
    """A setting for every group, what it was predicted to lose and what it lost, in nats a token, and its experts of a
    layer and step, vanilla layers included.
    """

    settings: dict[Layers, str]
    predicted: float
    loss: Loss
    experts: float
    kept_mass: float | None
    agreement: float


@dataclass
class Found:
    """What was found for a batch size. `tolerance` in nats a token, `before` vanilla's experts of a layer and step.
    `chosen` is None where nothing loses as little as tolerated; `confirmed` is what it loses on the held-out samples.
    """

    batch: int
    tolerance: float
    cross_entropy: float
    before: float
    options: dict[Layers, list[Option]]
    trials: list[Trial] = field(default_factory=list)
    chosen: Trial | None = None
    confirmed: Loss | None = None
    confirmed_experts: float | None = None


def search(
    bench: Bench,
    groups: Sequence[Layers],
    settings: Sequence[str],
    batch: int,
    tolerance: float,
    tell: Callable[[str], None],
) -> Found:
    """Find the settings with the fewest experts at one batch size, with at most `tolerance` (a share of vanilla's
    cross-entropy) lost. Measures every setting once a group, the last one everywhere, which tells what vanilla wakes,
    some combinations, and the best on held-out samples.
    """
    vanilla = bench.run({"policy": VANILLA}, batch, "tuning")
    everywhere = bench.run(build_policy(dict.fromkeys(groups, settings[-1])), batch, "tuning")
    options: dict[Layers, list[Option]] = {}
    for group in groups:
        measured = []
        for setting in settings:
            one = bench.run(_alone(group, groups, setting), batch, "tuning")
            if one.saved is None:
                continue  # it cannot change anything at this batch size
            loss = compare(one, vanilla).delta
            measured.append(Option(setting, loss, -one.saved))
            saved = one.saved / len(group)
            tell(f"layers {name_layers(group)}, {setting}: {saved:.1f} experts saved a layer, {1000 * loss:+.1f} mnats")
        options[group] = smooth([Option(VANILLA, 0.0, 0.0), *(option for option in measured if option.experts < 0)])
    tolerated = tolerance * vanilla.cross_entropy
    found = Found(batch, tolerated, vanilla.cross_entropy, everywhere.before or 0.0, options)
    allowed = tolerated
    for _ in range(ROUNDS):
        _try(bench, found, vanilla, allowed, tell)
        allowed *= _confirm(bench, found, allowed, tell)
        if found.chosen:
            break
    return found


def _alone(group: Layers, groups: Sequence[Layers], setting: str) -> dict[str, object]:
    return build_policy({one: setting if one == group else VANILLA for one in groups})


def _try(bench: Bench, found: Found, vanilla: Measurement, allowed: float, tell: Callable[[str], None]) -> None:
    """Try choices that should lose what is `allowed`, each corrected by what the one before lost."""
    allowance = allowed
    for _ in range(TRIALS):
        chosen = choose({name_layers(group): options for group, options in found.options.items()}, allowance)
        settings = {group: chosen[name_layers(group)].name for group in found.options}
        if any(trial.settings == settings for trial in found.trials) or set(settings.values()) == {VANILLA}:
            break
        measured = bench.run(build_policy(settings), found.batch, "tuning")
        predicted = sum(one.loss for one in chosen.values())
        trial = Trial(
            settings,
            predicted,
            compare(measured, vanilla),
            _count_experts(measured, found),
            measured.kept_mass,
            agreement(measured, vanilla),
        )
        found.trials.append(trial)
        lost = trial.loss.delta
        tell(f"together: {trial.experts:.1f} experts, {1000 * lost:+.1f} mnats ({1000 * predicted:.1f} predicted)")
        if NEAR * allowed <= lost <= allowed:
            break
        allowance *= min(max(allowed / max(lost, 1e-9), 0.5), 2.0)


def _count_experts(measured: Measurement, found: Found) -> float:
    """Of a layer and step, vanilla ones included."""
    return found.before - (measured.saved or 0.0) / sum(map(len, found.options))


def _confirm(bench: Bench, found: Found, allowed: float, tell: Callable[[str], None]) -> float:
    """Take the trial with the fewest experts that loses what is `allowed` where it was tried, and as little as
    tolerated on the held-out samples. Returns the share of `allowed` to try with where there is none.
    """
    good = sorted((one for one in found.trials if one.loss.delta <= allowed), key=lambda one: one.experts)
    if not good:
        return NEAR
    vanilla = bench.run({"policy": VANILLA}, found.batch, "held out")
    least = float("inf")
    for trial in good:
        measured = bench.run(build_policy(trial.settings), found.batch, "held out")
        loss = compare(measured, vanilla)
        low, high = (1000 * end for end in loss.interval)
        tell(f"held out: {trial.experts:.1f} experts, {1000 * loss.delta:+.1f} mnats, 95 % [{low:.1f}, {high:.1f}]")
        if loss.delta <= found.tolerance:
            found.chosen, found.confirmed = trial, loss
            found.confirmed_experts = _count_experts(measured, found)
            return 1.0
        least = min(least, loss.delta)
    return max(found.tolerance / least, 0.5)
