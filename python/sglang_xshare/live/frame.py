"""What `top` shows at once: a server's plan in force, its layers' active experts, and its speed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from .client import Client, PolicyError

METRICS = "/metrics"
SPEED, ACCEPTED = "sglang:gen_throughput", "sglang:spec_accept_length"
RUNNING, QUEUED = "sglang:num_running_reqs", "sglang:num_queue_reqs"


@dataclass(frozen=True)
class LayerLoad:
    """Of one MoE layer: mean active experts of a step under vanilla routing and under the policy, and mean kept
    mass of a row; where experts are paged, mean page-ins of a step. None where the layer had no step under policy.
    """

    layer: int
    before: float | None
    after: float | None
    kept_mass: float | None
    page_ins_before: float | None = None
    page_ins: float | None = None


@dataclass(frozen=True)
class Frame:
    """`seconds` that `layers` tell of, None for all since the plan is in force. The counts `since_switch` are as
    GET /expert_policy has them. Speed (tokens/s) and accepted length (tokens a verification) are SGLang's own gauges of
    its last log interval, None where it has not set them; replicas are added up, accepted lengths averaged.
    """

    url: str
    in_force: dict[str, Any]
    plan_hash: str
    switches: int
    since_switch: dict[str, Any]
    seconds: float | None
    layers: list[LayerLoad]
    tokens_per_second: float | None
    accepted_length: float | None
    running: int
    queued: int


@dataclass(frozen=True)
class Look:
    """One answer of the server: to GET /expert_policy, and its gauges by name and replica; `time` in seconds."""

    url: str
    answer: dict[str, Any]
    gauges: dict[str, list[float]]
    time: float


def look(client: Client, time: float) -> Look:
    """Ask a server. Raises `PolicyError` where it is gone, has no policy or no metrics, or refuses to tell."""
    answer = client.get_policy()
    if "by_layer" not in (answer.get("since_switch") or {}):
        raise PolicyError(f"{client.url}: it tells nothing by layer; allowed is a server with this package's version")
    try:
        text = client.read(METRICS).decode(errors="replace")
    except PolicyError as error:
        if error.status != 404:
            raise
        raise PolicyError(f"{client.url}: no {METRICS}; allowed is a server with --enable-metrics", 404) from None
    return Look(client.url, answer, read_gauges(text), time)


def read_gauges(text: str) -> dict[str, list[float]]:
    """The gauges that a frame shows, one value a replica, in prometheus's text format. Raises `PolicyError` for what is
    none.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[str, float]] = {name: {} for name in (SPEED, ACCEPTED, RUNNING, QUEUED)}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples if family.name in found else ():
                # Ranks of one replica may each export the same.
                replica = sample.labels.get("dp_rank", "")
                found[family.name][replica] = max(sample.value, found[family.name].get(replica, 0.0))
    except (ValueError, IndexError) as error:
        raise PolicyError(f"{METRICS}: no metrics ({error}); allowed is an SGLang server") from None
    return {name: list(values.values()) for name, values in found.items()}


def compare(now: Look, before: Look | None) -> Frame:
    """The frame of what happened between two looks; of all since the plan is in force without an earlier one, or where
    that one was at another plan, or at a server that has been restarted since.
    """
    layers = now.answer["since_switch"]["by_layer"]
    former = before.answer["since_switch"]["by_layer"] if before else []
    if before and not (now.answer["switches"] == before.answer["switches"] and _continues(layers, former)):
        before, former = None, []
    verifies = [length for length in now.gauges[ACCEPTED] if length]
    return Frame(
        url=now.url,
        in_force=now.answer["in_force"],
        plan_hash=now.answer["plan_hash"],
        switches=now.answer["switches"],
        since_switch=now.answer["since_switch"],
        seconds=now.time - before.time if before else None,
        layers=list(_subtract(layers, former or [dict.fromkeys(layer, 0) for layer in layers])),
        tokens_per_second=sum(now.gauges[SPEED]) if now.gauges[SPEED] else None,
        accepted_length=mean(verifies) if verifies else None,
        running=int(sum(now.gauges[RUNNING])),
        queued=int(sum(now.gauges[QUEUED])),
    )


def _continues(layers: list[dict[str, Any]], former: list[dict[str, Any]]) -> bool:
    """Whether these are later counts of the same server."""
    return len(layers) == len(former) and all(
        new["layer"] == old["layer"] and new["layer_steps"] >= old["layer_steps"]
        for new, old in zip(layers, former, strict=True)
    )


def _subtract(layers: list[dict[str, Any]], former: list[Mapping[str, Any]]) -> Iterator[LayerLoad]:
    for now, then in zip(layers, former, strict=True):
        new = {name: now[name] - then[name] for name in now}
        steps, rows = new["layer_steps"], new["rows"]
        yield LayerLoad(
            layer=now["layer"],
            before=new["experts_before"] / steps if steps else None,
            after=new["experts_after"] / steps if steps else None,
            kept_mass=new["kept_mass"] / rows if rows else None,
            **{name: new[name] / steps for name in ("page_ins_before", "page_ins") if name in new and steps},
        )
