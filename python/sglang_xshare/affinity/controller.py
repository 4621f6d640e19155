"""The dispatcher, which SGLang's data-parallel controller calls for every request. It also logs and counts."""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from . import METHOD
from .decision import REASONS, Affinity, Decision

logger = logging.getLogger(__name__)

PREFIX = "sglang:expert_affinity_"
LOG_INTERVAL = 10.0
"""The minimum time between two log lines, in seconds. A server without requests writes no line."""


class Dispatcher:
    """A dispatcher that sends each request to a worker of `controller`. `affinity` chooses the worker."""

    def __init__(self, controller: Any, affinity: Affinity, export: bool = False) -> None:
        self._controller = controller
        self.affinity = affinity
        self._counts = DecisionCounts(len(affinity.loads), export)
        self._logged = time.monotonic()
        # The controller calls `send_control_message` with every message that no other method handles.
        self._send_control_message = controller.send_control_message
        controller.send_control_message = self.receive

    def __call__(self, request: Any) -> None:
        """Send a request, which is a `TokenizedGenerateReqInput` or a `TokenizedEmbeddingReqInput`."""
        from sglang.srt.managers.io_struct import sock_send

        controller = self._controller
        if request.routed_dp_rank is not None:
            controller.maybe_external_dp_rank_routing(request)
            decision = self.decide(request, request.routed_dp_rank)
        else:
            active = controller._active_workers
            self.affinity.set_alive([replica for replica in active if controller.status[replica]])
            decision = self.decide(request)
            sock_send(controller.workers[decision.replica], request)
        self._counts.count(decision, self.affinity.loads)
        now = time.monotonic()
        if now - self._logged >= LOG_INTERVAL:
            self._logged = now
            logger.info(self._counts.format_log(self.affinity.loads))

    def decide(self, request: Any, replica: int | None = None) -> Decision:
        """Return the decision for a request. If `replica` is given, the request goes to this replica."""
        from sglang.srt.managers.utils import is_health_check_generate_req

        # A prompt of embeddings has no token ids, and the ids of a health check are arbitrary.
        tokens = () if is_health_check_generate_req(request) or request.input_ids is None else request.input_ids
        return self.affinity.choose(request.rid, tokens, **_describe(request), replica=replica)

    def receive(self, message: Any) -> None:
        """Handle a control message.

        A message from `report_end` removes an ended request from its replica. Any other message is sent to the workers.
        """
        if getattr(message, "method", None) == METHOD:
            self.affinity.finish(message.rid)
        else:
            self._send_control_message(message)


def _describe(request: Any) -> dict[str, Any]:
    """Return a request's conversation, session and salt, as keyword arguments of `Affinity.choose`."""
    session = getattr(request, "session_params", None)
    # All images have the same placeholder ids, so a prompt with an image has a salt of its own.
    image = request.rid if getattr(request, "mm_inputs", None) is not None else None
    return {
        "key": getattr(request, "routing_key", None) or getattr(request, "session_id", None),
        "session": None if session is None else session.id,
        "salt": (getattr(request, "extra_key", None), getattr(request, "lora_id", None), image),
    }


class DecisionCounts:
    """Counts of decisions since the last log line. With `export`, `/metrics` has the counts since the start."""

    def __init__(self, replicas: int, export: bool = False) -> None:
        self._sent = [0] * replicas
        self._reasons: Counter[str] = Counter()
        self._metrics = _make_metrics() if export else None

    def count(self, decision: Decision, loads: Sequence[int]) -> None:
        """Count one decision. `loads` [replicas] contains each replica's running requests after the decision."""
        self._sent[decision.replica] += 1
        self._reasons[decision.reason] += 1
        if self._metrics:
            requests, running = self._metrics
            requests.labels(replica=str(decision.replica), reason=decision.reason).inc()
            for replica, load in enumerate(loads):
                running.labels(replica=str(replica)).set(load)

    def format_log(self, loads: Sequence[int]) -> str:
        """Return the log line, and reset the counts."""
        sent, reasons, total = self._sent, self._reasons, sum(self._sent)
        self._sent, self._reasons = [0] * len(sent), Counter()
        shares = ", ".join(f"{name} {reasons[name] / total:.1%}" for name in REASONS if reasons[name])
        imbalance = max(loads) * len(loads) / max(sum(loads), 1)
        return (
            f"Expert affinity: {total} requests, {shares}; by replica: {' '.join(map(str, sent))}; "
            f"running: {' '.join(map(str, loads))}, imbalance: {imbalance:.2f}"
        )


def _make_metrics() -> tuple[Any, Any]:
    from prometheus_client import Counter as Total
    from prometheus_client import Gauge

    requests = "Requests dispatched by expert affinity, by replica and by the reason of the choice"
    running = "Requests sent to a replica and not finished, at the last dispatch"
    return (
        Total(PREFIX + "requests", requests, ("replica", "reason")),
        Gauge(PREFIX + "running_requests", running, ("replica",), multiprocess_mode="mostrecent"),
    )
