"""The function that starts the expert-selection stage in a scheduler process with a loaded model."""

import json
import logging
from functools import partial
from typing import Any

from .compatibility.all_to_all import read_ranks
from .compatibility.arguments import Arguments
from .compatibility.exact import find_refusal
from .policies.description import describe_mass
from .stage.acceptance import Acceptance
from .stage.exact import Exact
from .stage.forward import wrap_calls
from .stage.layer import Layer
from .stage.reports import Reports
from .stage.stage import Stage
from .upstream import batches, graphs, server

logger = logging.getLogger(__name__)


def start(model_runner: Any, arguments: Arguments, layers: list[Layer]) -> Reports:
    """Attach an expert-selection stage to the target model, and return the stage's reports."""
    config, schedule = server.resolved(model_runner.server_args), arguments.schedule
    ranks = read_ranks(model_runner, schedule)

    def find_batches(rows: str) -> batches.Batches:
        # SGLang sets both values when it creates its request pool, after the weights have loaded. Until then
        # `read_batches` predicts the values.
        requests = getattr(model_runner, "max_running_requests", None)
        sizes = None if requests is None else graphs.list_sizes(model_runner, config)
        return batches.read_batches(config, rows, requests, sizes)

    low_first = getattr(config, "schedule_low_priority_values_first", False)
    stage = Stage(
        layers,
        schedule,
        device=model_runner.device,
        trace=arguments.trace,
        masks=bool(getattr(model_runner.server_args, "mask_padding_experts", False)),
        ranks=ranks,
        tp_size=getattr(config, "tp_size", 1),
        stops=arguments.stops,
        exact=Exact(model_runner.device, low_first, find_refusal(config), arguments.ignores_exact),
        acceptance=Acceptance(server.draft_width(config)),
        find_batches=find_batches,
        recapture=partial(graphs.capture_again, model_runner),
    )
    name = schedule.policy if schedule else "none, padding masked,"
    plan = f": {json.dumps(stage.in_force.shown)}" if schedule else ""
    mass = describe_mass(schedule) if schedule else None
    kept = f"; a step keeps at least this share of its batch's utility: {mass}" if mass else ""
    logger.info("Expert policy %s on %d MoE layers%s%s", name, len(layers), plan, kept)
    wrap_calls(model_runner, reports := Reports(stage))
    if stage.in_force.shown is not None:
        server.show_plan(stage.in_force.shown)
    return reports
