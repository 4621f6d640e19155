"""Replicas of a model on a server, kept full by requests of mixed domains: what each of them answers, where it ran, and
how many experts were awake.
"""

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmark.common.evidence import evidence_between, read_totals
from benchmark.common.server import Server

SAMPLES = 500
"""Moments at which running requests are counted."""


@dataclass(frozen=True)
class Request:
    """A prompt of token ids, and how many tokens follow."""

    prompt: list[int]
    tokens: int


@dataclass(frozen=True)
class Run:
    """What came of all requests. `outputs`: greedy tokens of each, in order; `replicas`: who ran it, -1 where the
    server does not say; `active`: mean active experts a layer and step, `imbalance`: largest over mean running
    requests, mean over time, both while the load was steady; `seconds`: of all.
    """

    outputs: list[list[int]]
    replicas: list[int]
    active: float
    imbalance: float
    seconds: float


def draw_requests(prompts: Sequence[list[int]], count: int, life: int, seed: int = 0) -> list[Request]:
    """Requests of prompts as likely each, `life` tokens in the mean, half of it at least and half more at most."""
    source = random.Random(seed)
    return [Request(source.choice(prompts), source.randint(life // 2, life * 3 // 2)) for _ in range(count)]


def run_requests(server: Server, requests: Sequence[Request], replicas: int, per_replica: int) -> Run:
    """Keep `per_replica` requests of each replica running until all are answered. The server observes its experts."""
    asker = _Asker(server, requests, concurrency=replicas * per_replica)
    answers = asker.run()
    spans = [(answer.replica, answer.began, answer.ended) for answer in answers]
    return Run(
        outputs=[answer.output for answer in answers],
        replicas=[answer.replica for answer in answers],
        active=evidence_between(*asker.totals).experts_before or 0.0,
        imbalance=measure_imbalance(spans, replicas, *asker.steady),
        seconds=max(answer.ended for answer in answers) - min(answer.began for answer in answers),
    )


def measure_imbalance(spans: Sequence[tuple[int, float, float]], replicas: int, start: float, end: float) -> float:
    """Largest over mean running requests, mean of moments between `start` and `end`, of (replica, began, ended)."""
    values = []
    for number in range(SAMPLES):
        moment = start + (end - start) * number / SAMPLES
        loads = [0] * replicas
        for replica, began, ended in spans:
            if replica >= 0:
                loads[replica] += began <= moment < ended
        if sum(loads):
            values.append(max(loads) * replicas / sum(loads))
    return sum(values) / len(values) if values else float("nan")


@dataclass(frozen=True)
class _Answer:
    output: list[int]
    replica: int
    began: float
    ended: float


class _Asker:
    """Asks for every request, in order, from as many threads as run at a time; looks at the counters as the load turns
    steady, once every thread has begun a second request, and as the last request begins.
    """

    def __init__(self, server: Server, requests: Sequence[Request], concurrency: int) -> None:
        if len(requests) < 3 * concurrency:
            raise ValueError(f"{len(requests)} requests, {concurrency} at a time: allowed are 3 times as many")
        self._server, self._requests, self._concurrency = server, requests, concurrency
        self._looks = {2 * concurrency: 0, len(requests) - 1: 1}
        self._lock = threading.Lock()
        self._begun = 0
        self.totals: list[dict[str, float]] = [{}, {}]
        self.steady = [0.0, 0.0]

    def run(self) -> list[_Answer]:
        """All answers, in order."""
        with ThreadPoolExecutor(self._concurrency) as threads:
            return list(threads.map(self._ask, range(len(self._requests))))

    def _ask(self, number: int) -> _Answer:
        with self._lock:
            look = self._looks.get(self._begun)
            self._begun += 1
        if look is not None:
            self.totals[look], self.steady[look] = read_totals(self._server), time.monotonic()
        request = self._requests[number]
        sampling = {"max_new_tokens": request.tokens, "ignore_eos": True}
        began = time.monotonic()
        (answer,) = self._server.generate([request.prompt], **sampling)
        replica = answer["meta_info"].get("dp_rank")
        return _Answer(answer["output_ids"], -1 if replica is None else replica, began, time.monotonic())
