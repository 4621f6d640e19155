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
"""Reasons for a choice. affinity: the most similar experts and the longest cached prefix. bound: a more similar replica
is too full. idle: the chosen replica is idle, and a more similar one is busy. sticky: the replica of the conversation's
earlier turns. session: the replica of the session. load: the fewest requests, without signature and cached prefix.
directed: the client's choice.
"""
PREFIX_WEIGHT = 2.0
"""Weight of the cached share of a prompt, beside the similarity of experts. The similarity is about 0.5 within a domain
and below 0 across domains, so a cached third of a prompt outweighs a domain. A common beginning of all prompts is soon
in every cache, and decides nothing.
"""


def list_open(loads: Sequence[int], alive: Sequence[int], bound: float) -> list[int]:
    """Return the replicas of `alive` that may take one more request, at least one.

    These are the idle replicas, if there are any, else the replicas with at most `bound` times the mean load or the
    mean rounded up, whichever is more; the mean includes the new request.
    """
    idle = [replica for replica in alive if not loads[replica]]
    if idle:
        return idle
    mean = _mean(loads, alive)
    most = max(bound * mean, math.ceil(mean)) + 1e-9  # 1.15 * 100 is just below 115
    return [replica for replica in alive if loads[replica] + 1 <= most]


def price_load(loads: Sequence[int], alive: Sequence[int], bound: float) -> list[float]:
    """Return the price of one more request on each replica, in similarity.

    The price is 0 up to the mean load rounded up, then proportional to the load, and 1 at the bound. So a nearly full
    replica wins only by a clear similarity: in the simulation of benchmark/README.md (mixed traffic, 4 replicas) 44.6
    experts are active at an imbalance of 1.08.
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
    requests above the mean (`price_load`). `caches` is True if replicas cache prompts, so a repeated prompt may gain on
    its former replica. The same calls give the same decisions.
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
        """Decide where a request of these prompt tokens goes, and count the request there until `finish(request)`.

        `key` names a conversation, which keeps its replica within the bound; `session` names a state in a replica,
        which the session keeps at any load while the replica is alive. Prompts of different `salt` share no cache. A
        given `replica` gets the request, its conversation and its session.

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
        """Set the replicas that get requests. A replica that returns has an empty cache and its former experts."""
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
        """Return each replica's score for a request; None without a signature and a cached prefix."""
        cached = [PREFIX_WEIGHT * self._prefixes.match(replica, blocks) for replica in range(len(self.loads))]
        if signature is None:
            return cached if any(cached) else None
        similarity = self._centroids.compare(signature, np.array(self.loads, dtype=np.float32))
        return [float(similar) + share for similar, share in zip(similarity, cached, strict=True)]
