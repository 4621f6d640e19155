"""How long a decode step of a served model takes."""

import statistics
import time
from pathlib import Path

from benchmark.common.rounds import serve
from benchmark.common.variant import BASELINE, parse_variant

PROMPT, SHORT = 8, 8  # tokens


def time_decode_step(model: Path, requests: int, tokens: int, rounds: int) -> float:
    """Seconds a decode step of a vanilla server: what `tokens` more of every request cost, median of the rounds."""
    prompts = [[number + 1] * PROMPT for number in range(requests)]
    with serve(model, [parse_variant(BASELINE)]) as (server,):

        def generate(count: int) -> float:
            server.post("/flush_cache", {})
            began = time.perf_counter()
            server.generate(prompts, max_new_tokens=count, ignore_eos=True)
            return time.perf_counter() - began

        generate(4)  # the first batch warms up
        return statistics.median((generate(SHORT + tokens) - generate(SHORT)) / tokens for _ in range(rounds))
