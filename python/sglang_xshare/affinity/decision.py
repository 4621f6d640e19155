"""The decision: which replica gets a request."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from .centroids import Centroids
from .recent import KEYS, SESSIONS, Prefixes, Recent, hash_blocks
from .table import Floats, Table

DEFAULT = 1.175
"""The widest, of steps of 0.025, with which the load imbalance stayed below 1.1 in the mean over all traffic of
benchmark/README.md, at 2, 4 and 8 replicas.
"""
REASONS = ("affinity", "bound", "sticky", "session", "idle", "load", "directed")
"""Why a replica got a request: the most similar experts and the longest cached prefix (affinity); the replica with
these is too full (bound), or busy while this one is idle (idle); it had the conversation's earlier turns (sticky) or
has its session (session); without signature and cached prefix, the fewest requests (load); the client's choice
(directed).
"""
PREFIX_WEIGHT = 2.0
"""Of the share of a prompt that a replica has in its cache, beside the similarity of experts. That is about 0.5 within
a domain and below 0 across: a third of a prompt that need not be computed again outweighs a domain. What all prompts
begin with is soon in every cache, and decides nothing.
"""


def list_open(loads: Sequence[int], alive: Sequence[int], bound: float) -> list[int]:
    """Those of the replicas `alive` that may take one more request, never none: idle ones while there are any, else
    those with at most `bound` times the mean load, the new request counted, or the mean rounded up where that is more.
    """
    idle = [replica for replica in alive if not loads[replica]]
    if idle:
        return idle
    mean = _mean(loads, alive)
    most = max(bound * mean, math.ceil(mean)) + 1e-9  # 1.15 * 20 is just below 23
    return [replica for replica in alive if loads[replica] + 1 <= most]


def price_load(loads: Sequence[int], alive: Sequence[int], bound: float) -> list[float]:
    """What one more request on each replica costs, in similarity: nothing up to the mean load rounded up, then in
    proportion, 1 at the bound. At an equal imbalance fewer experts are active than under a bound alone: in the
    simulation of benchmark/README.md 44.6 at 1.08, where bounds without a price had 45.8 at 1.06 and 44.4 at 1.11.
    """
    mean = _mean(loads, alive)
    free, span = math.ceil(mean), mean * (bound - 1)
    return [max(load + 1 - free, 0) / span if span else 0.0 for load in loads]


def _mean(loads: Sequence[int], alive: Sequence[int]) -> float:
    """Of the replicas alive, one more request counted."""
    return (sum(loads[replica] for replica in alive) + 1) / len(alive)


@dataclass(frozen=True)
class Decision:
    """A replica and one of `REASONS`."""

    replica: int
    reason: str


class Affinity:
    """Sends requests to replicas, and knows what each replica runs: what it was sent and has not finished.

    `replicas`: how many; `bound`: the most requests of a replica, as a multiple of the mean (`list_open`), which also
    says what each above the mean costs (`price_load`); `caches`: whether replicas keep the prompts that they got, so
    that one may be better off where it was before. The same calls give the same decisions.
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

    def __contains__(self, request: Hashable) -> bool:
        """Whether a request runs."""
        return request in self._running

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
        """Decide where a request of these prompt tokens goes, and count it there until `finish(request)`. One that goes
        to `replica` whatever we think takes its conversation and its session there.

        `key` names a conversation, whose replica is kept within the bound; `session` one whose state lies in a replica,
        which is kept whatever it runs, as long as it lives. Prompts of different `salt` share no cache.

        Raises RuntimeError where no replica is alive.
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

    def finish(self, request: Hashable) -> bool:
        """A request has ended, in whatever way. Returns whether it was running."""
        if request not in self._running:
            return False
        replica, signature = self._running.pop(request)
        self.loads[replica] -= 1
        if signature is not None:
            self._centroids.remove(replica, signature)
        if not self.loads[replica]:
            self._centroids.clear(replica)
        return True

    def set_alive(self, alive: Sequence[int]) -> None:
        """Only these replicas get requests from now on. One that comes back has no cache, but its former experts."""
        for replica in set(self._alive) - set(alive):
            for request in [name for name, (home, _) in self._running.items() if home == replica]:
                self.finish(request)
            self._prefixes.clear(replica)
        self._alive = sorted(alive)

    def _decide(self, signature: Floats | None, blocks: Sequence[int], key: Hashable, session: Hashable) -> Decision:
        home = None if session is None else self._sessions.get(session)
        if home in self._alive:
            return Decision(home, "session")
        allowed = list_open(self.loads, self._alive, self.bound)
        home = None if key is None else self._homes.get(key)
        if home in allowed:
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
        """How much each replica suits a request; None where nothing is known of it."""
        cached = [PREFIX_WEIGHT * self._prefixes.match(replica, blocks) for replica in range(len(self.loads))]
        if signature is None:
            return cached if any(cached) else None
        similarity = self._centroids.compare(signature, np.array(self.loads, dtype=np.float32))
        return [float(similar) + share for similar, share in zip(similarity, cached, strict=True)]
