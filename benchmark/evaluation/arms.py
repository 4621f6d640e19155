"""The arms of a comparison on one running server: a policy by live control, then a pass of a task under it."""

from dataclasses import asdict, dataclass
from typing import Any

import requests

from benchmark.common.variant import BASELINE, OFF, parse_variant
from benchmark.evaluation.harness import Endpoint, Harness
from sglang_xshare.live.command import ask


@dataclass(frozen=True)
class Arm:
    """What one policy came to on one task: `scores` are the fields of `Score`; tokens written, and seconds for them;
    what the server counted meanwhile: means over layers and steps of active experts, upstream's and the policy's, the
    share of gating mass kept, and forwards under policy. None where it counted none.
    """

    task: str
    policy: str
    scores: list[dict[str, Any]]
    tokens: int
    seconds: float
    experts_before: float | None
    experts_after: float | None
    kept_mass: float | None
    policy_steps: int


def post_body(policy: str) -> dict[str, Any]:
    """What is posted for a policy as it is spelt on the command line."""
    variant = parse_variant(policy)
    return {"policy": BASELINE if policy == OFF else variant.policy, **variant.keys}


def run_arm(harness: Harness, endpoint: Endpoint, task: str, policy: str, limit: int | None, shots: int | None) -> Arm:
    """Switch the server to `policy`, empty its prefix cache, run the task.

    Raises `PolicyError` in one line where the server refuses, RuntimeError where a request fails.
    """
    ask(endpoint.url, post_body(policy), endpoint.api_key)
    _flush(endpoint)
    try:
        done = harness.run(task, endpoint, limit, shots)
    except Exception as error:  # of the harness's client, after its retries
        raise RuntimeError(
            f"task {task}, {policy}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from None
    since = ask(endpoint.url, None, endpoint.api_key)["since_switch"]
    counted = bool(since["layer_steps"])
    return Arm(
        task=task,
        policy=policy,
        scores=[asdict(score) for score in done.scores],
        tokens=done.tokens,
        seconds=done.seconds,
        experts_before=since["mean_before"] if counted else None,
        experts_after=since["mean_after"] if counted else None,
        kept_mass=since["mean_kept_mass"] if counted else None,
        policy_steps=since["outcomes"].get("policy", 0),
    )


def _flush(endpoint: Endpoint) -> None:
    """So that no arm finds the prompts of another in the prefix cache."""
    headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    response = requests.post(f"{endpoint.url}/flush_cache", headers=headers, timeout=60)
    if not response.ok:
        raise RuntimeError(
            f"{endpoint.url}/flush_cache: {response.status_code}: {' '.join(response.text.split())[:200]}"
        )
