"""The choice of a replica for each request."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from .centroids import Centroids
from .recent import KEYS, SESSIONS, Prefixes, Recent, hash_blocks
from .table import Floats, Table

DEFAULT = 1.175
"""The default bound. Bounds were tested in steps of 0.025 on all traffic of benchmark/README.md, with 2, 4 and 8
replicas. This is the largest bound at which the mean load imbalance stayed below 1.1.
"""
REASONS = ("affinity", "bound", "sticky", "session", "idle", "load", "directed")
"""The reasons for a choice.

- affinity: The replica has the highest score, from similar experts and a cached prefix.
- bound: Another replica has a higher score, but is full, or its load outweighs its higher score.
- idle: The replica is idle, and a busy replica has a higher score.
- sticky: The replica has served earlier turns of the conversation.
- session: The replica contains the session.
- load: The replica has the fewest requests. The request has neither a signature nor a cached prefix.
- directed: The client has chosen the replica.
"""
PREFIX_WEIGHT = 2.0
"""The weight of the cached share of a prompt, if the similarity of experts has weight 1. The similarity is about 0.5
within a domain and below 0 across domains. So a replica that has cached a third of a prompt wins over a replica of the
prompt's domain. A common beginning of all prompts is soon in every cache, and then does not affect the choice.
"""


def list_open(loads: Sequence[int], alive: Sequence[int], bound: float) -> list[int]:
    """Return the replicas that may receive one more request. At least one replica may.

    If any replica in `alive` is idle, only idle replicas may receive the request. Otherwise a replica may receive it if
    the replica then has at most max(`bound` x mean, mean rounded up) requests. The mean includes the new request.
    """
    idle = [replica for replica in alive if not loads[replica]]
    if idle:
        return idle
    mean = _mean(loads, alive)
    most = max(bound * mean, math.ceil(mean)) + 1e-9  # as a float, 1.15 * 100 is just below 115
    return [replica for replica in alive if loads[replica] + 1 <= most]


def price_load(loads: Sequence[int], alive: Sequence[int], bound: float) -> list[float]:
    """Return the price of one more request on each replica. The price is subtracted from the replica's score.

    The price is 0 as long as the load is at most the mean load, which is rounded up. Each further request adds
    1 / (mean x (bound - 1)), so the price is about 1 at the bound. A nearly full replica is therefore chosen only if
    its score is much higher. In the simulation of benchmark/README.md (mixed traffic, 4 replicas), 44.6 experts are
    active, compared with 54.0 under round robin. The load imbalance is then 1.08.
    """
    mean = _mean(loads, alive)
    free, span = math.ceil(mean), mean * (bound - 1)
    return [max(load + 1 - free, 0) / span if span else 0.0 for load in loads]


def _mean(loads: Sequence[int], alive: Sequence[int]) -> float:
    return (sum(loads[replica] for replica in alive) + 1) / len(alive)  # plus the new request


@dataclass(frozen=True)
class Decision:
    """The chosen replica, and the reason for the choice (one of `REASONS`)."""

    replica: int
    reason: str


class Affinity:
    """The choice of a replica for each request, and the running requests of each replica.

    `bound` limits the requests of a replica to a multiple of the mean (`list_open`). It also sets the price of requests
    above the mean (`price_load`). `caches` is True if replicas cache prompts. A prompt then costs less on a replica
    that has received a prompt with the same beginning. The same calls always give the same decisions.
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
        """Choose a replica for a request. The request counts as running there until `finish` is called.

        `tokens` contains the prompt's token ids. `key` names a conversation, whose requests go to the same replica as
        long as `list_open` includes this replica. `session` names a state that exists on one replica only. Its requests
        go to this replica at any load, as long as the replica is alive. Prompts with different `salt` share no cache.
        If `replica` is given, the request goes there, and its conversation and session move there.

        Raises RuntimeError if no replica is alive and `replica` is None.
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
        """Remove a request that has ended. Do nothing if the request is not running."""
        if request not in self._running:
            return
        replica, signature = self._running.pop(request)
        self.loads[replica] -= 1
        if signature is not None:
            self._centroids.remove(replica, signature)
        if not self.loads[replica]:
            self._centroids.clear(replica)

    def set_alive(self, alive: Sequence[int]) -> None:
        """Set the replicas that can receive requests.

        A replica that is no longer alive loses its requests and its cached prefixes. It keeps the signature of its past
        requests, in case it returns.
        """
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
        """Return each replica's score for a request, or None if the request has no signature and no cached prefix."""
        cached = [PREFIX_WEIGHT * self._prefixes.match(replica, blocks) for replica in range(len(self.loads))]
        if signature is None:
            return cached if any(cached) else None
        similarity = self._centroids.compare(signature, np.array(self.loads, dtype=np.float32))
        return [float(similar) + share for similar, share in zip(similarity, cached, strict=True)]
