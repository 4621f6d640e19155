"""Real servers, asked the same thing: what they answered, and what was counted in them."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmark.common.paths import ROOT
from benchmark.common.server import Server
from served.release import make_env

LAYERS = 4
NEW_TOKENS = 20
GAP = 0.02
"""Seconds between two requests that arrive one after another."""


def policy(name: str, **keys: Any) -> tuple[str, ...]:
    """The flags of a policy."""
    return "--expert-policy", name, "--expert-policy-config", json.dumps(keys)


def greedy(count: int, **more: Any) -> dict[str, Any]:
    """The sampling parameters of a greedy answer of so many tokens."""
    return {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True, **more}


FULL = policy("xshare", k0=1, add=64, utility="full")
"""Utility over all experts: of its own top-k's, a plan of so many could not change small batches, and would not run."""
FOUR = {
    **{"1": {"policy": "oea", "k0": 3}, "2": {"policy": "pruned", "k0": 1}},
    "3": {"policy": "lynx-lat", "retain": 12},
}
FOUR_MORE = {
    **{"1": {"policy": "lynx-acc", "confidence": 0.3}, "2": {"policy": "dynamic-skip", "beta": 0.5}},
    "3": {"policy": "custom", "k0": 0, "add": 10},
}
SERVERS: dict[str, tuple[str, ...]] = {
    "off": (),
    "vanilla": ("--expert-policy", "vanilla"),
    "xshare": policy("xshare", k0=1, add=8),
    "full budget": FULL,
    "four policies": policy("xshare", k0=1, add=4, layers=FOUR),
    "four more policies": policy("moe-spec", budget=12, phases=["decode"], layers=FOUR_MORE),
    "observe": policy("observe", plans=["xshare:k0=1,add=8", "xshare:k0=1,add=64", {"policy": "oea", "k0": 3}]),
    "sizes": policy(
        "xshare", k0=1, add=8, min_rows=4, max_rows=8, by_rows={"6-8": {"add": 0}}, layers={"2": {"policy": "vanilla"}}
    ),
}
"""Servers by name, each started once. Overrides by layer let four policies share one."""
SIZES = {"sizes": (2, 4, 8, 16)}
"""The batches a server is asked, where not 16, 16 and 1."""


@dataclass(frozen=True)
class Answers:
    """What a server said, and what was counted meanwhile."""

    tokens: list[list[list[int]]]
    """Greedy output of every batch of prompts asked. Without speculation, its decode steps all had its size."""
    verified: int
    """Verify steps of all requests together; 0 without speculation."""
    records: list[dict[str, Any]]
    """Every call of the MoE runner, as `probe.py` saw it."""
    metrics: dict[str, float]
    """Prometheus metrics: "steps policy" of an outcome, "observed_mass_total oea:k0=3" of an observed plan."""
    trace: list[dict[str, Any]]
    """The file of --expert-policy-trace."""
    log: str
    info: dict[str, Any]
    plans: list[str] = field(default_factory=list)
    """The hash of the plan in force by /metrics, of every process that has one."""

    def calls(self, mode: str, least: int = 1, most: int = 1 << 20) -> list[dict[str, Any]]:
        """The runner's calls in forwards of a mode with so many rows."""
        return [call for call in self.records if call["mode"] == mode and least <= call["rows"] <= most]

    def forwards(self, mode: str, least: int = 1, most: int = 1 << 20) -> int:
        """The number of such forwards."""
        return sum(call["layer"] == 0 for call in self.calls(mode, least, most))


def read_prompts(model: Path) -> list[str]:
    """Sixteen beginnings of held-out text, of different length, four of each domain."""
    texts = [file.read_text() for file in sorted((model / "heldout").glob("*.txt"))]
    return [text[place * 1000 : place * 1000 + 40 + 10 * place] for place in range(4) for text in texts]


def ask(model, tree, flags, scratch, sizes=(16, 16, 1), env=None, staggered=False):
    """Serve a checkpoint in fp32 from a release's tree, and ask it batches of prompts, at once or one after another."""
    server, probe, trace = make_server(model, tree, flags, scratch, env)
    prompts = read_prompts(model)
    with server:
        generate = generate_staggered if staggered else partial(generate_together, probe=probe)
        answers = [generate(server, prompts=prompts[:size]) for size in sizes]
        tokens = [read_tokens(batch) for batch in answers]
        verified = sum(answer["meta_info"].get("spec_verify_ct", 0) for batch in answers for answer in batch)
        records, metrics = read_all(server, probe)
        plans, info = read_plans(server.get("/metrics")), server.get("/server_info")
        return Answers(tokens, verified, records, metrics, read_lines(trace), server.log_text(), info, plans)


def make_server(model, tree, flags, scratch, env=None):
    """A server that is not started yet, with the files of its probe and its trace."""
    probe, trace = scratch / "probe.jsonl", scratch / "trace.jsonl"
    has_trace = "--expert-policy" in flags and not {"vanilla", "--dp-size"} & set(flags)  # replicas cannot share one
    traced = ["--expert-policy-trace", str(trace)] if has_trace else []
    args = ["--dtype", "float32", "--enable-metrics", "--decode-log-interval", "8", *flags, *traced]
    return Server(model, args, env=install_probe(tree, scratch, probe) | dict(env or {}), name="stage"), probe, trace


def install_probe(tree: Path, scratch: Path, probe: Path) -> dict[str, str]:
    """Put the plugin in `scratch`. Returns what a process's environment needs to run a release with it."""
    install_plugin(scratch, "served.probe:install")
    path = f"{make_env(tree)['PYTHONPATH']}:{ROOT / 'test'}:{scratch / 'plugin'}"
    return {"PYTHONPATH": path, "EXPERT_PROBE": str(probe)}


def install_plugin(scratch: Path, function: str) -> None:
    """Have upstream's `load_plugins()` call a function, `module:name`, in every process of a server of this scratch."""
    name = function.partition(":")[0].replace(".", "_")
    plugin = scratch / "plugin" / f"{name}-1.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {function}\n")


def generate_together(server, probe, prompts, count=NEW_TOKENS, **body):
    """Return greedy answers of `count` tokens, decoded in lockstep: prompts that were admitted in two groups are sent
    again. With speculation the first answers are returned, because requests advance each at their own pace.
    """
    for _ in range(20):
        server.post("/flush_cache", {})
        seen = len(read_lines(probe))
        answers = server.generate(prompts, body, max_new_tokens=count, ignore_eos=True)
        rows = {call["rows"] for call in read_lines(probe)[seen:] if call["mode"] == "DECODE"}
        if rows == {len(prompts)} or "spec_verify_ct" in answers[0]["meta_info"]:
            return answers
    raise AssertionError(f"decode steps of {rows} rows, never of {len(prompts)} alone")


def say_together(*args, **keys):
    """Return the tokens of these answers."""
    return read_tokens(generate_together(*args, **keys))


def generate_staggered(server, prompts):
    """Greedy answers to prompts that arrive one after another, while those before are decoded."""

    def generate(number):
        time.sleep(GAP * number)
        return server.generate([prompts[number]], max_new_tokens=NEW_TOKENS, ignore_eos=True)[0]

    server.post("/flush_cache", {})
    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(generate, range(len(prompts))))


def read_tokens(answers: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The tokens of answers."""
    return [answer["output_ids"] for answer in answers]


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file; none where there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def read_metrics(server: Server, forwards: int) -> dict[str, float]:
    """The stage's metrics, once all these forwards are counted: an idle server reports within a moment."""
    deadline = time.monotonic() + 60
    while True:
        metrics = parse_metrics(server.get("/metrics"))
        counted = sum(value for name, value in metrics.items() if name.startswith("steps "))
        if counted >= forwards or not metrics or time.monotonic() > deadline:
            return metrics
        time.sleep(0.2)


def read_all(server: Server, probe: Path, first_layer: int = 0) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the probe's records, and the stage's metrics once all forwards of the target model are counted."""
    records = read_lines(probe)
    targets = (record for record in records if record["rank"] == 0 and "DRAFT" not in record["mode"])
    return records, read_metrics(server, sum(record["layer"] == first_layer for record in targets))


def read_plans(text: str) -> list[str]:
    """The hash of the plan in force, of every process that has one: a former one is not there any more."""
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples if sample.name == "sglang:expert_policy_info"]
    assert {sample.value for sample in samples} <= {1}
    return [sample.labels["plan_hash"] for sample in samples]


def read_affinity(text: str, name: str) -> list[float]:
    """The values of a metric of expert affinity, by a regular expression for its name and labels."""
    return [float(value) for value in re.findall(rf"^sglang:expert_affinity_{name}.* (\S+)$", text, re.MULTILINE)]


def parse_metrics(text: str) -> dict[str, float]:
    """{"experts_after_total": 12.0, "steps policy": 3.0, ...}, summed over replicas."""
    metrics: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("sglang:expert_policy_")
            if name == sample.name or name.endswith("_created"):
                continue
            outcome, plan = sample.labels.get("outcome"), sample.labels.get("plan", "")
            if name.startswith("observed"):
                name = f"{name} {plan}"
            key = f"steps {outcome}" if outcome else name
            metrics[key] = metrics.get(key, 0.0) + sample.value
    return metrics
