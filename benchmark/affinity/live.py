"""Expert-affinity dispatch, served: `python -m benchmark.affinity.live`.

Replicas of the trained checkpoint in fp32, kept full by requests: what each is answered, where it ran, and how many
experts were active; and under a policy, with the text forced, what it costs. The servers run one after another, so that
each has all cores.
"""

import argparse
import hashlib
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.affinity.report import OBSERVE, tabulate_live
from benchmark.affinity.routing import Routing
from benchmark.affinity.simulation import SCENARIOS, make_traffic
from benchmark.affinity.texts import make_table
from benchmark.common.command import Parser, run_main
from benchmark.common.evidence import read_totals
from benchmark.common.paths import BUILD, TEXTS, TRAINED
from benchmark.common.record import Record
from benchmark.common.server import Server
from benchmark.common.variant import BASELINE, OFF, parse_plan, parse_variant
from benchmark.quality.model import load_model
from benchmark.quality.served import SERVER_ARGS
from benchmark.quality.text import Sequences, load_sequences
from sglang_xshare.affinity.decision import DEFAULT
from sglang_xshare.parser import LARGEST, between
from sglang_xshare.tune.forcing import read_step, serialize_force

METHODS = ("round_robin", "total_requests", "expert_affinity")
SERVED = tuple(name for name in SCENARIOS if name != "replica-dies")
"""SGLang ends a server whose replica dies: that one is simulated alone."""
TOLD = ("nats", "active", "rows", "imbalance", "seconds")
"""Of a run, as the record has it."""
SAMPLES = 500
"""Moments at which running requests are counted."""


@dataclass(frozen=True)
class Request:
    """A prompt of token ids, and the text that follows it."""

    prompt: list[int]
    text: list[int]


@dataclass(frozen=True)
class Run:
    """What came of all requests. `outputs`: tokens of each, in order; `nats`: mean of a token of each where the text
    was forced, else none; `replicas`: who ran it, -1 where the server does not say; `active` and `rows`: mean active
    experts and rows a layer and step, `imbalance`: largest over mean running requests, mean over time, all while the
    load was steady; `seconds`: of all.
    """

    outputs: list[list[int]]
    nats: list[float]
    replicas: list[int]
    active: float
    rows: float
    imbalance: float
    seconds: float


def draw_requests(
    sequences: Sequences, count: int, life: int, prompt: int, traffic: str = "mixed", seed: int = 0
) -> list[Request]:
    """Requests of a traffic of `SCENARIOS`: `prompt` tokens, then `life` in the mean, half of it to half more."""
    source, tokens = random.Random(seed), sequences.tokens.tolist()
    draw = make_traffic(traffic, Routing([row[:prompt] for row in tokens], sequences.domains, [], 0), count).draw
    requests = []
    for number in range(count):
        row = tokens[draw(source, number / count)]
        end = prompt + source.randint(life // 2, life * 3 // 2)
        requests.append(Request(row[:prompt], row[prompt:end]))
    return requests


def run_requests(
    server: Server,
    requests: Sequence[Request],
    replicas: int,
    per_replica: int,
    force: bool = False,
    counter: str = "experts_before",
) -> Run:
    """Keep `per_replica` requests of each replica running until all are answered; `counter` has the active experts."""
    asker = _Asker(server, requests, replicas * per_replica, force)
    answers = asker.run()
    first, last = asker.totals
    new = {name: last[name] - first.get(name, 0.0) for name in ("layer_steps", counter, "rows")}
    spans = [(answer.replica, answer.began, answer.ended) for answer in answers]
    return Run(
        outputs=[answer.output for answer in answers],
        nats=[answer.nats for answer in answers if answer.nats is not None],
        replicas=[answer.replica for answer in answers],
        active=new[counter] / new["layer_steps"],
        rows=new["rows"] / new["layer_steps"],
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
    nats: float | None
    replica: int
    began: float
    ended: float


class _Asker:
    """Asks for every request in order, from as many threads as run; looks at the counters while the load is steady."""

    def __init__(self, server: Server, requests: Sequence[Request], concurrency: int, force: bool) -> None:
        if len(requests) < 3 * concurrency:
            raise ValueError(f"{len(requests)} requests, {concurrency} at a time: allowed are 3 times as many")
        self._server, self._requests, self._concurrency = server, requests, concurrency
        self._force = {"custom_logit_processor": serialize_force(), "return_logprob": True} if force else {}
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
        began = time.monotonic()
        sampling: dict[str, Any] = {"max_new_tokens": len(request.text), "ignore_eos": True}
        if self._force:
            sampling["custom_params"] = {"tokens": request.text}
        (answer,) = self._server.generate([request.prompt], self._force, **sampling)
        ended, info = time.monotonic(), answer["meta_info"]
        nats = _read_nats(info["output_token_logprobs"]) if self._force else None
        replica = info.get("dp_rank")
        return _Answer(answer["output_ids"], nats, -1 if replica is None else replica, began, ended)


def _read_nats(told: Sequence[Sequence[Any]]) -> float:
    """Mean of a forced text's tokens, but for the first, which is the prefill's."""
    nats = [read_step(score, token, []).nats for score, token, *_ in told[1:]]
    return sum(nats) / len(nats)


def make_args(method: str, replicas: int, table: Path, bound: float) -> list[str]:
    """The flags of a server with so many replicas that observes its experts."""
    flags = ["--dp-size", str(replicas), "--dtype", "float32", "--expert-policy", OBSERVE, "--enable-metrics"]
    flags += ["--decode-log-interval", "4", "--disable-radix-cache", "--load-balance-method", method, *SERVER_ARGS]
    if method == "expert_affinity":
        flags += ["--expert-affinity", str(table), "--expert-affinity-bound", str(bound)]
    return flags


def make_env(replicas: int) -> dict[str, str]:
    """SGLang's CPU server wants to be told which core each replica takes; two of them share one where they must."""
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(place % 2) for place in range(replicas))}


def main(argv: Sequence[str] | None = None) -> None:
    """Serve into the record, print the table."""
    parser = Parser("benchmark.affinity.live", __doc__)
    names = f"{', '.join(METHODS)} (default: all)"
    parser.add_argument("methods", nargs="*", metavar="METHOD", default=METHODS, help=names)
    of = f"of {', '.join(SERVED)}, under the model's own routing (default: mixed)"
    parser.add_argument("--traffic", nargs="+", choices=SERVED, default=["mixed"], help=of)
    forced = f"with the text forced; their loss is shown where {BASELINE} is among them"
    parser.add_argument("--policies", nargs="*", type=_policy, default=[], metavar="POLICY", help=forced)
    parser.add_count("replicas", 4, "replicas of the model")
    parser.add_count("per_replica", 16, "requests at a time and replica")
    parser.add_count("requests", 768, "requests in all: runs of half as many scatter by two points and more")
    parser.add_count("life", 48, "tokens of an answer, in the mean")
    parser.add_count("prompt", 64, "tokens a prompt")
    parser.add_count("per_domain", 60, "prompts of each domain")
    parser.add_count("calibration", 20_000, "tokens of each domain that the table is calibrated on")
    at_least_one, of = between(1, LARGEST), "of the load (default: %(default)s)"
    parser.add_argument("--bound", type=at_least_one, default=DEFAULT, metavar="B", help=of)
    parser.add_record(BUILD / "affinity")
    args = parser.parse_args(argv)
    for name in args.methods:
        if name not in METHODS:
            parser.error(f"method {name!r}: allowed are {', '.join(METHODS)}")
    if args.life < 4:
        parser.error(f"--life {args.life}: allowed are at least 4 tokens, so that half of it has a decoded one")
    least = 3 * args.replicas * args.per_replica
    if args.requests < least:
        parser.error(f"--requests {args.requests}: allowed are at least {least}, 3 times --replicas * --per-replica")
    record = parser.open_record("live", args, argv)
    measure(args, record)
    tabulate_live(record.points).show(record.path)


def _policy(text: str) -> str:
    """A policy that a running server of these can be switched to, and that is no other case."""
    try:
        parse_plan(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if parse_variant(text).policy in (None, OBSERVE):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are policies other than {OFF} and {OBSERVE}")
    return text


def measure(args: argparse.Namespace, record: Record) -> None:
    """Serve what the record lacks: every case by each method in turn, on one server a method."""
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
        with Server(TRAINED, flags, env=make_env(args.replicas), name=method, deadline=900) as server:
            for traffic, name in missing:
                requests = draw_requests(sequences, args.requests, args.life, args.prompt, traffic)
                own = name in (OBSERVE, BASELINE)  # of both the model's own routing is counted
                server.post("/expert_policy", {"policy": OBSERVE} if own else parse_variant(name).body())
                counter = "experts_before" if own else "experts_after"
                run = run_requests(server, requests, args.replicas, args.per_replica, name != OBSERVE, counter)
                key = make_key(traffic, name, method)
                told = {one: value for one, value in vars(run).items() if one in TOLD}
                answers = " ".join(map(digest, run.outputs)) if name == OBSERVE else ""  # else forced
                record.add(key, traffic=traffic, policy=name, method=method, shape=shape, outputs=answers, **told)
                print(f"{key}: {run.active:.1f} active experts, {run.seconds:.0f} s", flush=True)


def make_key(traffic: str, name: str, method: str) -> str:
    """Of a point."""
    return f"{traffic}, {name}, {method}"


def digest(output: Sequence[int]) -> str:
    """What stands in the record for an answer's tokens: of 65,536 that differ one is taken for the same."""
    return hashlib.sha256(" ".join(map(str, output)).encode()).hexdigest()[:4]


if __name__ == "__main__":
    run_main("affinity", main)
