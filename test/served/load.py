"""Traffic for a running server, its route for switches, and the memory that it takes."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import requests

from benchmark.common.server import Server
from sglang_xshare.live import PATH

CLIENTS = 10


def post(server: Server, body: Mapping[str, Any]) -> requests.Response:
    return requests.post(server.url + PATH, json=body, timeout=120)


def keep_asking(server: Server, prompts: Sequence[str], client: int, ended: Event) -> int:
    """Requests of random lengths, one after another; each must have every token that was asked for."""
    choose, answered = random.Random(client), 0
    while not ended.is_set():
        length = choose.randrange(4, 40)
        (answer,) = server.generate(
            [choose.choice(prompts)[: choose.randrange(1, 60)]], max_new_tokens=length, ignore_eos=True
        )
        assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"]) == length
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        answered += 1
    return answered


def wait_for(done: Callable[[], object], seconds: float = 60) -> None:
    """Return once `done` returns something true. Raises AssertionError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@contextmanager
def load(server: Server, prompts: Sequence[str]) -> Iterator[list[int]]:
    """Traffic while the block runs; what was answered is in the list after it."""
    ended, answered = Event(), list[int]()
    with ThreadPoolExecutor(CLIENTS) as clients:
        asked = [clients.submit(keep_asking, server, prompts, number, ended) for number in range(CLIENTS)]
        try:
            yield answered
        finally:
            ended.set()
        answered += [one.result() for one in asked]


def resident_mib(server: Server) -> float:
    """Memory of all the server's processes."""
    return sum(process.memory_info().rss for process in server.processes()) / 2**20
