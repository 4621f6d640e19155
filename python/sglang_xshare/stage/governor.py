"""The governor in a running stage: what it has counted, the same on all ranks, and the budget it moves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..policies.governor import begin, decide
from ..policies.schedule import Schedule
from .evidence.metrics import KEPT, OUTCOMES, PREFIX, ROWS, Counters
from .graphs import Graphs
from .plans import Plans
from .upstream.ranks import add_over_ranks

SELECTING, UNCHANGED = OUTCOMES.index("policy"), OUTCOMES.index("unchanged")


class Governed:
    """Moves the budget of a stage's schedule. `look` is called before every forward of the target model. `make` gives
    the stage's plans for a schedule, and `move` puts others in force, in the order of the current stream.

    All ranks decide alike: each counts forwards, which ranks that share an expert's output run together, and what the
    ranks have counted is added up over them in the stream of the steps. Nothing else is decided on, and no clock.
    """

    def __init__(
        self,
        schedule: Schedule,
        make: Callable[[Schedule], Plans],
        move: Callable[[Plans], None],
        counters: Counters,
        graphs: Graphs,
    ) -> None:
        assert schedule.governor is not None
        self.schedule, self.governor = schedule, schedule.governor
        self._make, self._put, self._counters, self._graphs = make, move, counters, graphs
        self.search = begin(self.governor, schedule.keys[self.governor.key])
        self.moves = 0
        self.kept_mass: float | None = None
        """Of the steps that were last decided on."""
        self._plans: dict[int, Plans] = {}
        self._forwards = 0
        self._counted = self._count()
        self._asked: _Answer | None = None
        self._begun = False
        # A graph that is captured by the smallest budget follows to every other.
        self.plans = self._plan(self.governor.low if graphs.awaited else self.search.budget)
        """Those in force."""

    def look(self) -> None:
        """Decide on what `every` forwards have counted, when one more is launched: they are done by then, so that the
        host does not wait. The current stream is the steps' own. Raises RuntimeError where graphs were captured that no
        budget can be moved in.
        """
        if not self._begun:
            if self._graphs.awaited:
                return
            self._start()
        if self._asked is not None:
            self._decide(self._asked)
            self._asked, self._forwards = None, 0
        if self._forwards == self.governor.every:
            self._asked = _Answer(self._count() - self._counted)
        self._forwards += 1

    def _start(self) -> None:
        try:
            for end in (self.governor.low, self.governor.high):
                self._graphs.check(self.plans, self._plan(end))
        except ValueError as error:
            raise RuntimeError(f"--expert-policy-config governor: {error}") from None
        self._move()
        self.moves = 0
        self._begun = True

    def _decide(self, answer: _Answer) -> None:
        counts, ranks = answer.read()
        totals, outcomes = counts[: -len(OUTCOMES)], counts[-len(OUTCOMES) :]
        selecting, unchanged = outcomes[SELECTING], outcomes[UNCHANGED]
        if selecting + unchanged < ranks * self.governor.every:
            return  # there were prefills between
        # A plan that cannot change what the model does keeps all, and is not counted.
        kept = selecting * totals[KEPT] / max(totals[ROWS], 1) + unchanged
        self.kept_mass = kept / (selecting + unchanged)
        self.search = decide(self.governor, self.search, self.kept_mass)
        self._move()
        self._counted = self._count()

    def _move(self) -> None:
        plans = self._plan(self.search.budget)
        if plans is not self.plans:
            self._put(plans)
            self.plans = plans
            self.moves += 1

    def _plan(self, budget: int) -> Plans:
        if budget not in self._plans:
            self._plans[budget] = self._make(self.schedule.at(budget))
        return self._plans[budget]

    def _count(self) -> torch.Tensor:
        """[6 + outcomes] float64: what the stage has counted, over all layers."""
        return torch.cat([self._counters.totals.sum(0), self._counters.outcomes.double()])

    def describe(self) -> dict[str, Any]:
        """For GET /expert_policy."""
        return {
            "budget": self.search.budget,
            "settled": self.search.settled,
            "moves": self.moves,
            "kept_mass": self.kept_mass,
        }


class _Answer:
    """Counts on their way to the host."""

    def __init__(self, counts: torch.Tensor) -> None:
        counts, self._ranks = add_over_ranks(counts)
        self._counts, self._copied = counts, None
        if counts.is_cuda:
            self._counts = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            self._counts.copy_(counts, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> tuple[list[float], int]:
        """(the sum over ranks, of how many)."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._counts.tolist(), self._ranks


def govern(find: Callable[[], Governed | None], forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model runner's `forward`, which runs whole steps, captured ones too, with a look before each of the governor in
    force.
    """

    @functools.wraps(forward)
    def governed_forward(*args: Any, **kwargs: Any) -> Any:
        governed = find()
        if governed is not None:
            governed.look()
        return forward(*args, **kwargs)

    return governed_forward


def format_governor(governed: Governed | None) -> str:
    """The governor's part of the decode log line."""
    if governed is None:
        return ""
    return f", governed {governed.governor.key}: {governed.search.budget} after {governed.moves} moves"


class GovernorExporter:
    """The prometheus metrics of a governor, made at the first export, as `Exporter`'s are."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}
        self._exported: tuple[Governed | None, int] = None, 0

    def export(self, governed: Governed | None, labels: dict[str, str]) -> None:
        """Set the gauge to the budget in force, and count the moves since the last export."""
        if governed is None:
            return
        if not self._metrics:
            from prometheus_client import Counter, Gauge

            name, text = PREFIX + "governor_budget", "The budget in force that the governor moves"
            self._metrics["budget"] = Gauge(name, text, tuple(labels), multiprocess_mode="mostrecent")
            text = "Moves of the budget by the governor"
            self._metrics["moves"] = Counter(PREFIX + "governor_moves", text, tuple(labels))
        former, moves = self._exported
        self._metrics["budget"].labels(**labels).set(governed.search.budget)
        self._metrics["moves"].labels(**labels).inc(governed.moves - (moves if governed is former else 0))
        self._exported = governed, governed.moves
