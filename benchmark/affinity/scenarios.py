"""The traffic that is simulated."""

import random
from collections.abc import Callable

from benchmark.affinity.routing import Routing
from benchmark.affinity.simulation import Traffic

SCENARIOS = ("mixed", "one-domain", "shift", "flood", "replica-dies")


def make_traffic(name: str, routing: Routing, requests: int) -> Traffic:
    """The traffic of that name.

    mixed: every sequence as likely. one-domain: the first domain alone. shift: the first half of the domains, then the
    other half. flood: mixed, but nine of ten requests of the middle third are of one domain. replica-dies: mixed; the
    last replica is dead in the middle third.
    """
    everything = list(range(len(routing.prompts)))
    domains = sorted(set(routing.domains))
    early = [place for name in domains[: len(domains) // 2] for place in routing.of_domain(name)]
    late = [place for place in everything if place not in early]
    flooding = routing.of_domain(domains[0])

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
