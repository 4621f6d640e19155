"""The stage around one target model: decides for every forward whether, and with which plan, its MoE layers select."""

from __future__ import annotations

import functools
import logging
from typing import Any

from ..plan import SelectionPlan
from ..policies import VANILLA
from .alignment import Aligner
from .arguments import Arguments, ExpertPolicyError
from .compatibility import end_refused, refusal
from .layer import Layer
from .mask import check_maskable
from .metrics import Counters, Exporter, Reader, format_log
from .placement import read_placement
from .step import Step, read_step
from .trace import Trace
from .upstream import is_first_rank, num_schedulers, number_layer, ranks_logits, resolved

logger = logging.getLogger(__name__)


class PolicyBypassed(RuntimeError):
    """A step under policy in which some MoE layer did not select, or its runner did not take what it was to take: the
    server must not go on as if it had.
    """


class Stage:
    """Wraps a loaded model's `forward` and its MoE layers, as (TopKConfig, Layer). One per process, put in place by
    `stage.attach`.
    """

    def __init__(self, model: Any, layers: list[tuple[Any, Layer]], device: str, arguments: Arguments) -> None:
        self.schedule = arguments.schedule
        # A CPU server without graphs has no padding rows but those of a gather, which are always masked; elsewhere the
        # mask is one comparison a step.
        self.mask_padding = device != "cpu" or self.schedule is None
        self.layers = layers
        self.counters = Counters(len(layers), device)
        self.logged, self.exported = Reader(self.counters), Reader(self.counters)
        self.trace = None
        if arguments.trace is not None:
            self.trace = Trace(arguments.trace, [layer.layer_id for _, layer in layers], device)
        self.exporter = Exporter()
        self.aligner = Aligner() if arguments.align else None
        for _, layer in layers:
            layer.aligner = self.aligner
        self._by_config = {id(config): layer for config, layer in layers}
        self._running = False
        self._published = 0, 0
        """The scheduler's counts when metrics and trace were last brought up to date."""
        model.forward = self._wrap(model.forward)
        name = self.schedule.policy if self.schedule else "none, padding masked,"
        logger.info("Expert policy %s on %d MoE layers", name, len(self.layers))

    def route(self, topk_config: Any) -> Any:
        """The config to route with. A config that is not the target's (a draft's) is returned as it is."""
        layer = self._find_selecting(topk_config)
        return topk_config if layer is None else layer.config

    def mask_logits(self, topk_config: Any, router_logits: Any) -> Any:
        """The logits for a runner that ranks them itself; those of a layer that does not select are returned as is."""
        layer = self._find_selecting(topk_config)
        return router_logits if layer is None else layer.mask(router_logits)

    def align(self, upstream: Any, by_tma: bool) -> Any:
        """`upstream` (moe_align_block_size), or what answers it from sorted slots where the stage has them."""
        return upstream if self.aligner is None else functools.partial(self.aligner.align, upstream, by_tma)

    def _find_selecting(self, topk_config: Any) -> Layer | None:
        """The layer of a config, where it selects in this step."""
        layer = self._by_config.get(id(topk_config))
        if layer is None:
            return None
        if not self._running:
            if layer is self.layers[0][1]:
                self.counters.count_outcome("no_context")
            return None
        return None if layer.plan is None else layer

    def report(self, reporter: Any) -> str:
        """What happened since the last line of the decode log."""
        self.publish(reporter)
        return format_log(self.logged.read())

    def publish(self, reporter: Any) -> None:
        """Bring metrics and trace up to date. Here and in `report` alone the host waits for the device: once a log
        interval, and when the server turns idle.

        Ranks of data-parallel attention log each for themselves, but have all seen the same steps: one exports them.
        """
        # An idle server asks again and again, and must not copy from the device each time. Forwards are counted when
        # they are launched, also those for other ranks' requests alone; decode steps when they are done.
        forwards = reporter.scheduler.forward_ct, reporter.forward_ct_decode
        if not is_first_rank() or forwards == self._published:
            return
        self._published = forwards
        if reporter.current_scheduler_metrics_enabled:
            self.exporter.export(self.exported.read(), reporter.metrics_collector.labels)
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
        for _, layer in self.layers:
            layer.step = step
            layer.selection = None
            layer.plan = None if reason is not None or step is None else self._plan(layer, step)
        if reason is None and all(layer.plan is None for _, layer in self.layers):
            reason = "override"
        self.counters.count_outcome(reason or "policy", step)
        if self.aligner is not None:
            self.aligner.unasked = 0
        self._running = True

    def _reason_to_skip(self, step: Step | None) -> str | None:
        if step is None:
            return "prefill"
        return None if self.schedule is None else self.schedule.reason_to_skip(step.phase, step.rows)

    def _plan(self, layer: Layer, step: Step) -> SelectionPlan | None:
        return VANILLA if self.schedule is None else self.schedule.plan(layer.layer_id, step.rows)

    def _finish(self, step: Step) -> None:
        """Check that every layer with a plan has selected, and count what it chose."""
        missed = [layer.layer_id for _, layer in self.layers if layer.plan is not None and layer.selection is None]
        if missed:
            raise PolicyBypassed(f"MoE layers {missed} did not route through the expert policy in a {step.phase} step")
        if self.aligner is not None and self.aligner.unasked:
            raise PolicyBypassed(
                "--expert-policy-align: the MoE runner did not ask for the slots of the experts chosen"
            )
        selections = [layer.selection for _, layer in self.layers]
        if any(selection is not None for selection in selections):
            counts = self.counters.count_selections(selections, step)
            if self.trace is not None:
                self.trace.record(counts, step)


def find_layers(model_runner: Any, arguments: Arguments) -> list[tuple[Any, Layer]]:
    """(TopKConfig, Layer) of every MoE layer of this rank's model.

    Ends the process with one line for a router or a runner the stage cannot serve: what only a loaded model shows.
    """
    try:
        return read_layers(model_runner, arguments)
    except ExpertPolicyError as error:
        if num_schedulers(resolved(model_runner.server_args)) > 1:
            raise  # SGLang's controller of several would wait forever for one that only ended
        end_refused(error)


def read_layers(model_runner: Any, arguments: Arguments) -> list[tuple[Any, Layer]]:
    """The same. Raises `ExpertPolicyError` for an unknown router and for an MoE layer without one."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.topk import TopK

    modules = dict(model_runner.model.named_modules())
    routers = {name: module for name, module in modules.items() if isinstance(module, TopK)}
    numbers = {name: number_layer(name, module.layer_id) for name, module in routers.items()}
    plans = _plans_of(arguments, list(numbers.values()), model_runner)
    placement = read_placement(model_runner)
    layers = []
    for name, module in routers.items():
        config = module.topk_config
        try:
            layer = Layer(numbers[name], config, placement)
            if arguments.align and layer.num_shared:
                raise ValueError(
                    "its runner takes shared experts' slots too, which --expert-policy-align does not sort; allowed is "
                    "--disable-shared-experts-fusion"
                )
            if ranks_logits(config):
                for plan in plans:
                    check_maskable(plan, layer.router)
            layers.append((config, layer))
        except ValueError as error:
            raise refusal(name, "router", str(error)) from None
    runners = sum(isinstance(module, FusedMoE) for module in modules.values())
    if not layers or len(layers) < runners:  # DeepSeek's first model has a TopK, but runs its experts without FusedMoE
        reason = f"{len(layers)} TopK modules for {runners} MoE layers; allowed is one for each"
        raise refusal("--model-path", model_runner.server_args.model_path, reason)
    return layers


def _plans_of(arguments: Arguments, layers: list[int], model_runner: Any) -> list[SelectionPlan]:
    """The plans that these layers can get. Raises `ExpertPolicyError` where every one of them is always vanilla."""
    if arguments.schedule is None or not layers:
        return [VANILLA]
    is_whole = resolved(model_runner.server_args).pp_size == 1
    try:
        return arguments.schedule.plans(layers if is_whole else None)
    except ValueError as error:
        raise ExpertPolicyError(f"--expert-policy {arguments.schedule.policy}: {error}") from None
