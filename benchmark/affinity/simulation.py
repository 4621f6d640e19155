"""A simulation of requests on several replicas. The dispatcher chooses the replica of each request."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmark.affinity.routing import Routing
from sglang_xshare.affinity.decision import Affinity
from sglang_xshare.affinity.table import Table


class RoundRobin:
    """SGLang's round-robin rule, which uses the replicas in turn."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, request: int, prompt: Sequence[int], alive: Sequence[int]) -> int:
        """Choose a replica for a request from the replicas that are alive."""
        self._turn += 1
        return alive[self._turn % len(alive)]

    def finish(self, request: int) -> None:
        """Handle the end of a request. Round robin ignores it."""


class ByAffinity(RoundRobin):
    """The dispatcher of a server without a prompt cache, because the simulation repeats texts too often for a cache."""

    def __init__(self, table: Table, replicas: int, bound: float) -> None:
        self.affinity = Affinity(table, replicas, bound, caches=False)

    def choose(self, request: int, prompt: Sequence[int], alive: Sequence[int]) -> int:
        """Return the replica that `Affinity` chooses."""
        self.affinity.set_alive(alive)
        return self.affinity.choose(request, prompt).replica

    def finish(self, request: int) -> None:
        """Report the end of a request to the dispatcher."""
        self.affinity.finish(request)


@dataclass(frozen=True)
class Traffic:
    """The traffic of a simulation.

    - `draw`: a function that returns the sequence of the next request. Its arguments are a random source and the share
      of the requests that have been sent.
    - `alive`: a function that returns the replicas that are alive. Its arguments are the number of replicas and the
      share of the requests that have been sent.
    - `requests`: the total number of requests.
    - `per_replica`: the number of concurrent requests per replica.
    - `life`: the mean number of steps of a request. A request takes 0.5 to 1.5 times this number.
    """

    draw: Callable[[random.Random, float], int]
    alive: Callable[[int, float], list[int]] = lambda replicas, share: list(range(replicas))
    requests: int = 1200
    per_replica: int = 16
    life: int = 48


@dataclass
class Outcome:
    """The results of a simulation.

    - `active`: the mean number of active experts, after a fifth of the requests has been sent.
    - `imbalance`: the running requests of the busiest replica divided by the mean of all replicas. This is a mean over
      the steps after a sixth of the requests has been sent.
    - `course`: the mean number of active experts in each tenth of the run.
    """

    active: float
    imbalance: float
    course: list[float]


@dataclass
class _Request:
    name: int
    sequence: int
    life: int
    step: int = 0


def simulate(routing: Routing, rule: RoundRobin, replicas: int, traffic: Traffic, seed: int = 0) -> Outcome:
    """Simulate the traffic. In every step, the replicas that are alive run as many requests as they can."""
    source, sent = random.Random(seed), 0
    running: list[list[_Request]] = [[] for _ in range(replicas)]
    actives: list[list[float]] = [[] for _ in range(10)]
    imbalances: list[float] = []
    while sent < traffic.requests:
        alive = traffic.alive(replicas, sent / traffic.requests)
        for dead in set(range(replicas)) - set(alive):
            for request in running[dead]:
                rule.finish(request.name)
            running[dead] = []
        while sum(map(len, running)) < traffic.per_replica * len(alive) and sent < traffic.requests:
            sequence = traffic.draw(source, sent / traffic.requests)
            life = source.randint(traffic.life // 2, traffic.life * 3 // 2)
            chosen = rule.choose(sent, routing.prompts[sequence], alive)
            running[chosen].append(_Request(sent, sequence, min(life, len(routing.experts[sequence]))))
            sent += 1
        tenth = actives[min(10 * sent // traffic.requests, 9)]
        tenth += [
            routing.active([(one.sequence, one.step) for one in running[place]]) for place in alive if running[place]
        ]
        if 6 * sent > traffic.requests:
            loads = [len(running[place]) for place in alive]
            imbalances.append(max(loads) * len(loads) / sum(loads))
        for ended in _advance(running):
            rule.finish(ended.name)
    steady = [active for tenth in actives[2:] for active in tenth]
    course = [sum(tenth) / len(tenth) for tenth in actives if tenth]
    return Outcome(sum(steady) / len(steady), sum(imbalances) / len(imbalances), course)


def _advance(running: list[list[_Request]]) -> Iterator[_Request]:
    """Advance every request by one step, and yield the requests that end."""
    for requests in running:
        for one in requests:
            one.step += 1
        yield from (one for one in requests if one.step >= one.life)
        requests[:] = [one for one in requests if one.step < one.life]


SCENARIOS = ("mixed", "one-domain", "shift", "flood", "replica-dies")


def make_traffic(name: str, domains: Sequence[str], requests: int) -> Traffic:
    """Return the traffic of a scenario. `domains` contains the domain of each sequence.

    - mixed: all sequences are equally likely.
    - one-domain: all requests belong to the first domain.
    - shift: the requests belong to the first half of the domains, and later to the second half.
    - flood: mixed, but in the middle third of the run 90 % of the requests belong to one domain.
    - replica-dies: mixed, but in the middle third of the run the last replica is dead.
    """
    everything = list(range(len(domains)))
    names = sorted(set(domains))
    early = [place for name in names[: len(names) // 2] for place in everything if domains[place] == name]
    late = [place for place in everything if place not in early]
    flooding = [place for place in everything if domains[place] == names[0]]

    def middle(share: float) -> bool:
        return 1 / 3 <= share < 2 / 3

    draws: dict[str, Callable[[random.Random, float], int]] = {
        "one-domain": lambda source, share: source.choice(flooding),
        "shift": lambda source, share: source.choice(early if share < 0.5 else late),
        "flood": lambda source, share: source.choice(
            flooding if middle(share) and source.random() < 0.9 else everything
        ),
    }
    draw = draws.get(name, lambda source, share: source.choice(everything))
    if name != "replica-dies":
        return Traffic(draw, requests=requests)
    return Traffic(draw, lambda replicas, share: list(range(replicas - middle(share))), requests=requests)
