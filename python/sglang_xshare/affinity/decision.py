"""The choice of the replica that gets a request."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from .centroids import Centroids
from .recent import KEYS, SESSIONS, Prefixes, Recent, hash_blocks
from .table import Floats, Table

DEFAULT = 1.175
"""Default bound: the widest, in steps of 0.025, at which the mean load imbalance over all traffic of
benchmark/README.md stayed below 1.1, with 2, 4 and 8 replicas.
"""
REASONS = ("affinity", "bound", "sticky", "session", "idle", "load", "directed")
"""Reasons for a choice. affinity: the highest score, by similar experts and cached prefix. bound: another replica has a
higher score, but is full or too loaded for its lead. idle: the chosen replica is idle, and a busy one has a higher
score. sticky: the replica of the conversation's earlier turns. session: the replica of the session. load: the fewest
requests, because the request has neither signature nor cached prefix. directed: the client's choice.
"""
PREFIX_WEIGHT = 2.0
"""Weight of the cached share of a prompt, beside the similarity of experts. The similarity is about 0.5 within a domain
and below 0 across domains, so a replica that has cached a third of a prompt wins over a replica of the prompt's domain.
A common beginning of all prompts is soon in every cache, and decides nothing.
"""


def list_open(loads: Sequence[int], alive: Sequence[int], bound: float) -> list[int]:
    """Return the replicas of `alive` that may take one more request, at least one.

    If any replica is idle, only idle replicas may. Otherwise a replica may have, with the new request, at most
    max(`bound` x mean, mean rounded up) requests. The mean counts the new request.
    """
    idle = [replica for replica in alive if not loads[replica]]
    if idle:
        return idle
    mean = _mean(loads, alive)
    most = max(bound * mean, math.ceil(mean)) + 1e-9  # as a float, 1.15 * 100 is just below 115
    return [replica for replica in alive if loads[replica] + 1 <= most]


def price_load(loads: Sequence[int], alive: Sequence[int], bound: float) -> list[float]:
    """Return the price of one more request on each replica, a number to subtract from the replica's score.

    The price is 0 up to the mean load rounded up. Each request above that adds 1 / (mean x (bound - 1)), so the price
    is about 1 at the bound, and a nearly full replica wins only by a clear lead. In the simulation of
    benchmark/README.md (mixed traffic, 4 replicas) 44.6 experts are active instead of round robin's 54.0, at an
    imbalance of 1.08.
    """
    mean = _mean(loads, alive)
    free, span = math.ceil(mean), mean * (bound - 1)
    return [max(load + 1 - free, 0) / span if span else 0.0 for load in loads]


def _mean(loads: Sequence[int], alive: Sequence[int]) -> float:
    return (sum(loads[replica] for replica in alive) + 1) / len(alive)  # the new request counts


@dataclass(frozen=True)
class Decision:
    """A replica and one of `REASONS`."""

    replica: int
    reason: str


class Affinity:
    """Decisions for requests to `replicas` replicas, and each replica's running requests.

    `bound` is the most requests of a replica, as a multiple of the mean (`list_open`); it also sets the price of
    requests above the mean (`price_load`). `caches` is True if replicas cache prompts: a prompt is then cheaper on a
    replica that has received a prompt with the same beginning. The same calls give the same decisions.
    """

    def __init__(self, table: Table, replicas: int, bound: float = DEFAULT, caches: bool = True) -> None:
        self.table = table
        self.bound = bound
        self.caches = caches
        self.loads = [0] * replicas
        self._alive = list(range(replicas))
        self._running: dict[Hashable, tuple[int, Floats | None]] = {}
        self._centroids = Centroids(table.samples.astype(np.float32), replicas)
        self._prefixes = Prefixes(replicas)
        self._homes = Recent(KEYS)
        self._sessions = Recent(SESSIONS)

    def choose(
        self,
        request: Hashable,
        tokens: Sequence[int],
        *,
        key: Hashable = None,
        session: Hashable = None,
        salt: Hashable = None,
        replica: int | None = None,
    ) -> Decision:
        """Choose a replica for a request with these prompt tokens, and count the request there until `finish(request)`.

        `key` names a conversation: its requests go to the same replica while `list_open` contains that replica.
        `session` names a state that lives in one replica: its requests go there at any load while the replica is alive.
        Prompts of different `salt` share no cache. `replica`, if given, gets the request, its conversation and session.

        Raises RuntimeError if no replica is alive.
        """
        if not self._alive and replica is None:
            raise RuntimeError("no replica is alive")
        signature, blocks = self.table.sign(tokens), hash_blocks(tokens, salt) if self.caches else []
        decision = self._decide(signature, blocks, key, session) if replica is None else Decision(replica, "directed")
        self.finish(request)
        self._running[request] = decision.replica, signature
        self.loads[decision.replica] += 1
        self._prefixes.add(decision.replica, blocks)
        if signature is not None:
            self._centroids.add(decision.replica, signature)
        for homes, name in ((self._homes, key), (self._sessions, session)):
            if name is not None:
                homes[name] = decision.replica
        return decision

    def finish(self, request: Hashable) -> None:
        """Remove an ended request, if it runs."""
        if request not in self._running:
            return
        replica, signature = self._running.pop(request)
        self.loads[replica] -= 1
        if signature is not None:
            self._centroids.remove(replica, signature)
        if not self.loads[replica]:
            self._centroids.clear(replica)

    def set_alive(self, alive: Sequence[int]) -> None:
        """Set the replicas that get requests. A replica that returns has no cache, but its past requests' signature."""
        for replica in set(self._alive) - set(alive):
            for request in [name for name, (home, _) in self._running.items() if home == replica]:
                self.finish(request)
            self._prefixes.clear(replica)
        self._alive = sorted(alive)

    def _decide(self, signature: Floats | None, blocks: Sequence[int], key: Hashable, session: Hashable) -> Decision:
        if (home := self._sessions.get(session)) in self._alive:
            return Decision(home, "session")
        allowed = list_open(self.loads, self._alive, self.bound)
        if (home := self._homes.get(key)) in allowed:
            return Decision(home, "sticky")
        scores = self._score(signature, blocks)
        if scores is None:
            return Decision(min(allowed, key=lambda replica: self.loads[replica]), "load")

        prices = price_load(self.loads, self._alive, self.bound)
        chosen = max(allowed, key=lambda replica: (scores[replica] - prices[replica], -self.loads[replica]))
        if chosen == max(self._alive, key=lambda replica: (scores[replica], -self.loads[replica])):
            return Decision(chosen, "affinity")
        return Decision(chosen, "bound" if self.loads[chosen] else "idle")

    def _score(self, signature: Floats | None, blocks: Sequence[int]) -> list[float] | None:
        """Return each replica's score for a request; None for a request with neither signature nor cached prefix."""
        cached = [PREFIX_WEIGHT * self._prefixes.match(replica, blocks) for replica in range(len(self.loads))]
        if signature is None:
            return cached if any(cached) else None
        similarity = self._centroids.compare(signature, np.array(self.loads, dtype=np.float32))
        return [float(similar) + share for similar, share in zip(similarity, cached, strict=True)]
