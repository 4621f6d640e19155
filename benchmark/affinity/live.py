"""Measure expert-affinity dispatch on servers: `python -m benchmark.affinity.live`.

Each server runs several replicas of the trained checkpoint in float32, and all replicas are kept busy. The record
contains the answers and the number of active experts. Under a policy, the server is forced to decode a given text, and
the record contains its loss. The servers run one after another, so each server can use all cores.
"""

import argparse
import hashlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmark.affinity.report import OBSERVE, tabulate_live
from benchmark.affinity.simulation import SCENARIOS, make_traffic
from benchmark.affinity.texts import make_table
from benchmark.common.command import Parser, run_main
from benchmark.common.evidence import read_totals
from benchmark.common.paths import BUILD, TEXTS, TRAINED
from benchmark.common.record import Record
from benchmark.common.server import Server, bind_ranks
from benchmark.common.variant import BASELINE, OFF, parse_plan, parse_variant
from benchmark.quality.model import load_model
from benchmark.quality.served import SERVER_ARGS
from benchmark.quality.text import Sequences, load_sequences
from sglang_xshare.affinity.decision import DEFAULT
from sglang_xshare.parser import LARGEST, between
from sglang_xshare.tune.forcing import read_step, serialize_force
from sglang_xshare.tune.texts import Sample

METHODS = ("round_robin", "expert_affinity")
SERVED = tuple(name for name in SCENARIOS if name != "replica-dies")
"""The scenarios for real servers. SGLang stops a server if a replica dies, so "replica-dies" is only simulated."""
KEPT = ("nats", "active", "rows", "imbalance", "seconds")
"""The fields of a run that the record contains."""
SAMPLES = 500
"""The number of moments at which the running requests are counted."""
Span = tuple[int, float, float]
"""The replica that ran a request, and the times at which the request began and ended, in seconds."""


@dataclass(frozen=True)
class Run:
    """The results of a run.

    - `outputs`: the tokens of each answer.
    - `nats`: the mean loss per token of each answer, if the text was forced.
    - `replicas`: the replica that ran each request, or -1 if the server does not report it.
    - `active` and `rows`: the mean number of active experts and of rows per layer and step, under steady load.
    - `imbalance`: the running requests of the busiest replica divided by the mean of all replicas. This is a mean over
      time, under steady load.
    - `seconds`: the duration of the run.
    """

    outputs: list[list[int]]
    nats: list[float]
    replicas: list[int]
    active: float
    rows: float
    imbalance: float
    seconds: float


def draw_requests(sequences: Sequences, count: int, life: int, prompt: int, traffic: str = "mixed") -> list[Sample]:
    """Return `count` requests with the traffic of a scenario.

    Each request has `prompt` prompt tokens. Its answer has 0.5 to 1.5 times `life` tokens.
    """
    source, tokens = random.Random(0), sequences.tokens.tolist()
    draw = make_traffic(traffic, sequences.domains, count).draw
    requests = []
    for number in range(count):
        row = tokens[draw(source, number / count)]
        end = prompt + source.randint(life // 2, life * 3 // 2)
        requests.append(Sample(row[:prompt], row[prompt:end]))
    return requests


def run_requests(
    server: Server,
    requests: Sequence[Sample],
    replicas: int,
    per_replica: int,
    force: bool = False,
    counter: str = "experts_before",
) -> Run:
    """Send all requests to the server, so that `per_replica` requests per replica run at the same time.

    `force` makes the server decode a given text for each request. `counter` is the name of the server's counter for
    active experts.
    """
    concurrency = replicas * per_replica
    if len(requests) < 3 * concurrency:
        raise ValueError(f"requests must be at least 3 times the concurrency, {concurrency} (got {len(requests)})")
    forcing = {"custom_logit_processor": serialize_force(), "return_logprob": True} if force else {}
    first, last = 2 * concurrency, len(requests) - 1  # the load is steady between these two requests
    looks: dict[int, tuple[dict[str, float], float]] = {}

    def ask(number: int) -> tuple[list[int], list[float], Span]:
        if number in (first, last):
            looks[number] = read_totals(server), time.monotonic()
        request, began = requests[number], time.monotonic()
        sampling: dict[str, Any] = {"max_new_tokens": len(request.text), "ignore_eos": True}
        if force:
            sampling["custom_params"] = {"tokens": request.text}
        (answer,) = server.generate([request.prompt], forcing, **sampling)
        ended, info = time.monotonic(), answer["meta_info"]
        # The first score is omitted, because the prefill predicts the first token.
        scores = info["output_token_logprobs"][1:] if force else []
        nats = [read_step(score, token, []).nats for score, token, *_ in scores]
        replica = info.get("dp_rank")
        return answer["output_ids"], nats, (-1 if replica is None else replica, began, ended)

    with ThreadPoolExecutor(concurrency) as threads:
        outputs, nats, spans = zip(*threads.map(ask, range(len(requests))), strict=True)
    (before, start), (after, end) = looks[first], looks[last]
    new = {name: after[name] - before.get(name, 0.0) for name in ("layer_steps", counter, "rows")}
    return Run(
        outputs=list(outputs),
        nats=[fmean(one) for one in nats if one],
        replicas=[replica for replica, _, _ in spans],
        active=new[counter] / new["layer_steps"],
        rows=new["rows"] / new["layer_steps"],
        imbalance=measure_imbalance(spans, replicas, start, end),
        seconds=max(ended for _, _, ended in spans) - min(began for _, began, _ in spans),
    )


def measure_imbalance(spans: Sequence[Span], replicas: int, start: float, end: float) -> float:
    """Return the running requests of the busiest replica divided by the mean of all replicas, as a mean over time."""
    values = []
    for number in range(SAMPLES):
        moment = start + (end - start) * number / SAMPLES
        running = Counter(replica for replica, began, ended in spans if replica >= 0 and began <= moment < ended)
        if running:
            values.append(max(running.values()) * replicas / running.total())
    return fmean(values) if values else float("nan")


def make_args(method: str, replicas: int, table: Path, bound: float) -> list[str]:
    """Return the flags of a server with this number of replicas. The server starts with the policy `observe`."""
    flags = ["--dp-size", str(replicas), "--dtype", "float32", "--expert-policy", OBSERVE, "--enable-metrics"]
    flags += ["--decode-log-interval", "4", "--disable-radix-cache", "--load-balance-method", method, *SERVER_ARGS]
    if method == "expert_affinity":
        flags += ["--expert-affinity", str(table), "--expert-affinity-bound", str(bound)]
    return flags


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the table."""
    parser = Parser("benchmark.affinity.live", __doc__)
    names = f"{', '.join(METHODS)} (default: all)"
    parser.add_argument("methods", nargs="*", metavar="METHOD", default=METHODS, help=names)
    of = f"of {', '.join(SERVED)}, under the model's own routing (default: mixed)"
    parser.add_argument("--traffic", nargs="+", choices=SERVED, default=["mixed"], help=of)
    forced = f"with the text forced; their loss is shown if {BASELINE} is among them"
    parser.add_argument("--policies", nargs="*", type=_policy, default=[], metavar="POLICY", help=forced)
    parser.add_count("replicas", 4, "replicas of the model")
    parser.add_count("per_replica", 16, "requests at a time and replica")
    parser.add_count("requests", 768, "requests in all; fewer scatter more")
    parser.add_count("life", 48, "mean tokens of an answer")
    parser.add_count("prompt", 64, "tokens a prompt")
    parser.add_count("per_domain", 60, "prompts of each domain")
    parser.add_count("calibration", 20_000, "tokens of each domain that the table is calibrated on")
    at_least_one, of = between(1, LARGEST), "of the load (default: %(default)s)"
    parser.add_argument("--bound", type=at_least_one, default=DEFAULT, metavar="B", help=of)
    parser.add_record(BUILD / "affinity")
    args = parser.parse_args(argv)
    for name in args.methods:
        if name not in METHODS:
            parser.error(f"METHOD must be one of {', '.join(METHODS)} (got {name!r})")
    if args.life < 4:
        parser.error(f"--life must be at least 4, because half of --life must have a decoded token (got {args.life})")
    least = 3 * args.replicas * args.per_replica
    if args.requests < least:
        parser.error(f"--requests must be at least {least}, 3 times --replicas * --per-replica (got {args.requests})")
    record = parser.open_record("live", args, argv)
    measure(args, record)
    tabulate_live(record.points).show(record.path)


def _policy(text: str) -> str:
    """Check that a policy can be activated on a running server, and that it is not `off` or `observe`."""
    try:
        parse_plan(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if parse_variant(text).policy in (None, OBSERVE):
        raise argparse.ArgumentTypeError(f"must be a policy other than {OFF} and {OBSERVE} (got {text!r})")
    return text


def measure(args: argparse.Namespace, record: Record) -> None:
    """Measure all cases that are missing in the record. Each load balance method has its own server."""
    cases = [(traffic, OBSERVE) for traffic in args.traffic] + [("mixed", name) for name in args.policies]
    if all(make_key(traffic, name, method) in record for traffic, name in cases for method in args.methods):
        return
    table = BUILD / "affinity" / "live.safetensors"
    make_table(load_model(TRAINED), TRAINED, args.calibration).save(table)
    sequences = load_sequences(TEXTS, TRAINED, args.prompt + args.life * 3 // 2, args.per_domain)
    shape = {name: getattr(args, name) for name in ("replicas", "per_replica", "life")}
    for method in args.methods:
        missing = [case for case in cases if make_key(case[0], case[1], method) not in record]
        if not missing:
            continue
        flags = make_args(method, args.replicas, table, args.bound)
        with Server(TRAINED, flags, env=bind_ranks(args.replicas), name=method, deadline=900) as server:
            for traffic, name in missing:
                requests = draw_requests(sequences, args.requests, args.life, args.prompt, traffic)
                own = name in (OBSERVE, BASELINE)  # these use the model's own routing
                server.post("/expert_policy", {"policy": OBSERVE} if own else parse_variant(name).body())
                counter = "experts_before" if own else "experts_after"
                run = run_requests(server, requests, args.replicas, args.per_replica, name != OBSERVE, counter)
                key = make_key(traffic, name, method)
                kept = {one: value for one, value in vars(run).items() if one in KEPT}
                answers = " ".join(map(digest, run.outputs)) if name == OBSERVE else ""  # all other answers are forced
                record.add(key, traffic=traffic, policy=name, method=method, shape=shape, outputs=answers, **kept)
                print(f"{key}: {run.active:.1f} active experts, {run.seconds:.0f} s", flush=True)


def make_key(traffic: str, name: str, method: str) -> str:
    """Return the key of a point in the record."""
    return f"{traffic}, {name}, {method}"


def digest(output: Sequence[int]) -> str:
    """Return the first 16 bits of an answer's hash. The record contains the hash instead of the tokens."""
    return hashlib.sha256(" ".join(map(str, output)).encode()).hexdigest()[:4]


if __name__ == "__main__":
    run_main("affinity", main)
