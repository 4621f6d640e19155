"""The stage around one target model: decides for every forward whether, and with which plan, its MoE layers select."""

from __future__ import annotations

import functools
import json
import logging
import sys
from pathlib import Path
from typing import Any

from ..plan import SelectionPlan
from ..policies import VANILLA
from ..policies.description import describe
from ..policies.schedule import Schedule
from .alignment import Aligner
from .balance import Balance, BalanceExporter, BalanceReader, format_balance
from .batches import Batches
from .layer import MASKED, Layer
from .metrics import Counters, Exporter, Reader, format_log
from .observe import Observation, ObservationExporter, ObservationReader, format_observed
from .step import Step, read_step
from .trace import Trace
from .upstream import is_first_rank, is_recorded

logger = logging.getLogger(__name__)


class PolicyBypassed(RuntimeError):
    """A step under policy in which some MoE layer did not select, or its runner did not ask for the sorted slots. The
    server stops rather than go on without its policy.
    """


class Stage:
    """Wraps a loaded model's `forward` and its MoE layers, as (TopKConfig, Layer). One per process, put in place by
    `stage.attach`.

    `schedule` is None where no policy is given and padding rows alone are masked. `trace` is the file to append to, and
    `align` has layers sort the slots for the MoE runner. `batches` are what the server's steps can have.
    """

    def __init__(
        self,
        model: Any,
        layers: list[tuple[Any, Layer]],
        device: str,
        schedule: Schedule | None,
        trace: Path | None = None,
        align: bool = False,
        batches: Batches = Batches(),  # noqa: B008 - it never changes
    ) -> None:
        self.schedule = schedule
        # A CPU server captures no graphs, so that only a gather pads its rows, and those are always masked. Elsewhere
        # the mask takes one comparison a step.
        self.mask_padding = device != "cpu" or self.schedule is None
        self.layers = layers
        self.batches = batches
        self.counters = Counters(len(layers), device)
        self.logged, self.exported = Reader(self.counters), Reader(self.counters)
        self.observation = Observation(schedule, len(layers), device) if schedule and schedule.observed else None
        placement = layers[0][1].placement
        self.balance = None
        if placement is not None and schedule is not None and self.observation is None:
            self.balance = Balance(placement, [layer.layer_id for _, layer in layers], device)
            self.logged_balance, self.exported_balance = (BalanceReader(self.balance) for _ in range(2))
            self.balance_exporter = BalanceExporter()
        self.trace = None
        if trace is not None:
            observed = list(schedule.observed) if schedule else []
            self.trace = Trace(trace, [layer.layer_id for _, layer in layers], device, observed)
        self.plan = describe(schedule, layers[0][1].router.top_k) if schedule else None
        """The plan in force, JSON-able; None where padding rows alone are masked."""
        self.exporter = Exporter(self.plan)
        if self.observation is not None:
            self.logged_plans, self.exported_plans = (ObservationReader(self.observation) for _ in range(2))
            self.plans_exporter = ObservationExporter()
        self.aligner = Aligner() if align else None
        for number, (_, layer) in enumerate(layers):
            layer.aligner = self.aligner
            layer.find_tally = functools.partial(self.counters.tally, number)
        self._by_config = {id(config): layer for config, layer in layers}
        self._by_own = {id(layer.config): layer for _, layer in layers}
        self._running = False
        self._published = 0, 0
        """What the scheduler had counted when metrics and trace were last brought up to date."""
        model.forward = self._wrap(model.forward)
        name = self.schedule.policy if self.schedule else "none, padding masked,"
        plan = f": {json.dumps(self.plan)}" if self.plan else ""
        logger.info("Expert policy %s on %d MoE layers%s", name, len(self.layers), plan)

    def route(self, topk_config: Any, router_logits: Any) -> Any:
        """The config to route the logits with. A config that is not the target's (a draft's) is returned as it is."""
        layer = self._find_selecting(topk_config, router_logits)
        return topk_config if layer is None else layer.config

    def prepare(self, topk_config: Any, output_format: Any, router_logits: Any) -> tuple[Any, Any]:
        """(what a runner that would rank logits itself is handed, the logits): masked ones, or in their place ids and
        weights, which are routed next. As they are for a layer that does not select.
        """
        layer = self._by_config.get(id(topk_config))
        if layer is None or not layer.routes_itself or self._find_selecting(topk_config, router_logits) is None:
            return output_format, router_logits
        if layer.convention == MASKED:
            if output_format == type(output_format).BYPASSED:
                router_logits = router_logits.bfloat16()  # which the runner ranks
            return output_format, layer.mask(router_logits)
        return type(output_format).STANDARD, router_logits

    def finish(self, topk_config: Any, ids: Any, weights: Any) -> Any:
        """Ids [n, columns] as the runner of a layer takes them that has chosen them by its own config."""
        layer = self._by_own.get(id(topk_config))
        return ids if layer is None else layer.finish(ids, weights)

    def align(self, upstream: Any, by_tma: bool) -> Any:
        """`upstream` (moe_align_block_size), or a function in its place that returns sorted slots where it has them."""
        return upstream if self.aligner is None else functools.partial(self.aligner.align, upstream, by_tma)

    def _find_selecting(self, topk_config: Any, router_logits: Any) -> Layer | None:
        """The layer of a config, where it selects in this step. One that is observed selects beside the model, here,
        and is routed as one that does not.
        """
        layer = self._by_config.get(id(topk_config))
        if layer is None:
            return None
        if not self._running:
            # A graph would count again at every replay, inside a forward that is counted as what it is.
            if layer is self.layers[0][1] and not is_recorded():
                self.counters.count_outcome("no_context")
            return None
        if layer.plan is not None and self.observation is not None:
            self.observation.observe(layer, router_logits)
            return None
        return None if layer.plan is None else layer

    def report(self, reporter: Any) -> str:
        """What happened since the last line of the decode log."""
        self.publish(reporter)
        text = format_log(self.logged.read())
        if self.balance is not None:
            text += format_balance(self.logged_balance.read())
        if self.observation is not None:
            plans, _ = self.logged_plans.read()
            text += format_observed(plans)
        return text

    def publish(self, reporter: Any) -> None:
        """Bring metrics and trace up to date. The host waits for the device only here and in `report`: once a log
        interval, and when the server turns idle.

        Ranks of data-parallel attention each write their own log. All have seen the same steps, so that one exports.
        """
        # An idle server asks again and again, and must not copy from the device each time. SGLang counts forwards, also
        # those for other ranks' requests alone, when it launches them, and decode steps when they are done.
        forwards = reporter.scheduler.forward_ct, reporter.forward_ct_decode
        if not is_first_rank() or forwards == self._published:
            return
        self._published = forwards
        if reporter.current_scheduler_metrics_enabled:
            self.exporter.export(self.exported.read(), reporter.metrics_collector.labels)
            if self.balance is not None:
                self.balance_exporter.export(self.exported_balance.read(), reporter.metrics_collector.labels)
            if self.observation is not None:
                self.plans_exporter.export(*self.exported_plans.read(), reporter.metrics_collector.labels)
        if self.trace is not None and reporter.is_stats_logging_rank:
            self.trace.write()

    def _wrap(self, forward: Any) -> Any:
        @functools.wraps(forward)  # upstream inspects the signature for pipeline parallelism
        def forward_with_policy(*args: Any, **kwargs: Any) -> Any:
            forward_batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
            step = read_step(forward_batch, self.mask_padding)
            self._begin(step)
            try:
                output = forward(*args, **kwargs)
                if step is not None:
                    self._finish(step)
                return output
            finally:
                self._running = False

        return forward_with_policy

    def _begin(self, step: Step | None) -> None:
        """Hand every layer its plan for this step, or none."""
        reason = self._reason_to_skip(step)
        reasons = set()
        for _, layer in self.layers:
            layer.step = step
            layer.selection = None
            layer.plan = None
            if reason is None and step is not None:
                layer.plan, against = self._plan(layer, step.rows, step.batch.tokens_per_request)
                reasons.add(against)
        if reason is None and None not in reasons:
            reason = "unchanged" if "unchanged" in reasons else "override"
        self.counters.count_outcome(reason or ("policy" if self.observation is None else "observed"), step)
        if self.aligner is not None:
            self.aligner.unasked = 0
        self._running = True

    def _reason_to_skip(self, step: Step | None) -> str | None:
        if step is None:
            return "prefill"
        return None if self.schedule is None else self.schedule.reason_to_skip(step.phase, step.rows)

    @functools.cache  # noqa: B019 - one stage lives as long as its process
    def _plan(self, layer: Layer, rows: int, tokens_per_request: int) -> tuple[SelectionPlan | None, str | None]:
        """(the layer's plan for so many rows, None), or (None, why it has none). A plan that cannot change what the
        model does is none, unless it masks padding.
        """
        if self.schedule is None:
            return VANILLA, None
        plan = self.schedule.plan(layer.layer_id, rows)
        if plan is None:
            return None, "override"
        is_needed = self.observation is not None or self.batches.pad(rows)
        # A layer knows its experts only when it routes. Of ever so many, a plan is taken to change no less.
        if not is_needed and not plan.can_change(layer.router, sys.maxsize, rows, tokens_per_request):
            return None, "unchanged"
        return plan, None

    def _finish(self, step: Step) -> None:
        """Check that every layer with a plan has selected, and count what it chose."""
        missed = [layer.layer_id for _, layer in self.layers if layer.plan is not None and layer.selection is None]
        if missed:
            raise PolicyBypassed(f"MoE layers {missed} did not route through the expert policy in a {step.phase} step")
        if self.aligner is not None and self.aligner.unasked:
            raise PolicyBypassed(
                "--expert-policy-align: the MoE runner did not ask for the slots of the experts chosen"
            )
        layers = [layer for _, layer in self.layers]
        if all(layer.selection is None for layer in layers):
            return
        if self.observation is not None:
            counts, observed = self.observation.count(layers, step)
            self.counters.totals += counts
        else:
            counts, observed = self.counters.count([layer.selection for layer in layers], step), []
            if self.balance is not None:
                self.balance.count([layer.selection for layer in layers])
        if self.trace is not None:
            self.trace.record(counts, step, observed)
