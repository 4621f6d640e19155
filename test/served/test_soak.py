"""Minutes of requests that come, go and are aborted: the server under policy counts its steps, and does not grow."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmark.common.evidence import read_settled_totals
from benchmark.common.server import Server, ServerError
from served.answers import policy, read_prompts
from served.load import resident_mib
from served.release import LATEST

SECONDS, WARM_UP = 200, 30
CLIENTS = 24
ABORTED = 0.1
"""Share of the requests."""


def keep_asking(server: Server, prompts: list[str], client: int, until: float) -> tuple[int, int]:
    """Requests answered and aborted, one after another, of random lengths, greedy or not."""
    choose = random.Random(client)
    answered = aborted = 0
    while time.monotonic() < until:
        prompt = choose.choice(prompts)[: choose.randrange(1, 60)]
        rid = f"{client}-{answered}-{aborted}"
        sampling = {"max_new_tokens": choose.randrange(1, 64), "temperature": choose.choice([0.0, 1.0])}
        if choose.random() < ABORTED:
            with ThreadPoolExecutor(1) as thread:
                asked = thread.submit(server.generate, [prompt], {"rid": [rid]}, **sampling | {"max_new_tokens": 400})
                time.sleep(0.1)
                server.post("/abort_request", {"rid": rid})
                try:
                    asked.result(60)
                except ServerError:
                    assert server.returncode() is None
            aborted += 1
        else:
            (answer,) = server.generate([prompt], {"rid": [rid]}, **sampling)
            assert answer["meta_info"]["completion_tokens"] > 0
            answered += 1
    return answered, aborted


@pytest.mark.long
def test_minutes_of_traffic(tiny_model, patched_release):
    prompts = read_prompts(tiny_model)
    flags = [*policy("xshare", k0=1, add=8), "--enable-metrics", "--enable-mixed-chunk", "--chunked-prefill-size", "32"]
    with Server(tiny_model, flags, release=patched_release(LATEST), name="soak") as server:
        (before,) = server.generate(prompts[:1], max_new_tokens=20)
        with ThreadPoolExecutor(CLIENTS) as clients:
            until = time.monotonic() + SECONDS
            asked = [clients.submit(keep_asking, server, prompts, number, until) for number in range(CLIENTS)]
            time.sleep(WARM_UP)
            warm = resident_mib(server)
            answered, aborted = map(sum, zip(*(one.result() for one in asked), strict=True))
        assert answered > 10 * CLIENTS
        assert aborted > CLIENTS
        assert resident_mib(server) < 1.05 * warm
        (after,) = server.generate(prompts[:1], max_new_tokens=20)
        assert after["output_ids"] == before["output_ids"], "a batch of one row is vanilla"
        totals = read_settled_totals(server)
        assert totals["steps:policy"] > 1000
        assert totals["steps:no_context"] == totals["steps:override"] == 0
        assert totals["experts_after"] < totals["experts_before"]
        assert "Scheduler hit an exception" not in server.log_text()
