"""The functions that the patched SGLang calls to run the expert-selection stage.

SGLang's `server_args.py` imports this module, so this module imports neither torch nor SGLang. Without a policy, every
function returns at once. For example, `route` only makes one comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from . import affinity
from .live import METHOD
from .policies.exact import KEY
from .stage import handover
from .stage.record import metadata

if TYPE_CHECKING:
    from .compatibility.checks import Start
    from .depth.report import DepthReport
    from .live.control import Control
    from .stage.reports import Reports
    from .stage.stage import Stage

FLAGS = (
    "expert_policy",
    "expert_policy_config",
    "expert_policy_trace",
    "expert_policy_on_disagreement",
    "expert_policy_ignore_client_exact",
    "expert_policy_draft_depth",
    "mask_padding_experts",
    "expert_placement",
    "expert_affinity",
    "expert_affinity_bound",
)
"""The arguments that the patches add. The patched `expert_policy.py` repeats them for a server without this package."""

_stage: Stage | None = None
_reports: Reports | None = None
_control: Control | None = None
_depth: DepthReport | None = None


class Refused(SystemExit, ValueError):
    """The error that ends a server after a check has refused it. Its message is one line.

    If nothing catches the error, Python prints the line without a traceback and exits with status 1. Code that uses
    `Engine(...)` can catch the error as a `ValueError`.
    """


def check_flags(server_args: Any) -> None:
    """Check the flags before SGLang resolves them, and set the arguments that they imply. Raises `Refused`."""
    if _is_asked(server_args):
        from .compatibility.checks import set_arguments

        set_arguments(_check_start(server_args, "given"))


def check_server(server_args: Any) -> None:
    """Check resolved arguments and the model before weights load. Set environment variables. Raises `Refused`."""
    if _is_asked(server_args):
        from .compatibility.checks import set_environment

        set_environment(_check_start(server_args, "resolved"))


def _check_start(server_args: Any, when: str) -> Start:
    """Run the checks for `when`, which is "given" or "resolved". Raises `Refused` if a check fails."""
    from .compatibility.checks import Start, find_refusals

    start = Start(server_args)
    for error in find_refusals(start, when):
        raise Refused(str(error)) from None
    return start


def _is_asked(server_args: Any) -> bool:
    """Return whether the user has set a flag in `FLAGS`, or turned on expert-affinity dispatch."""
    given = (getattr(server_args, name, None) for name in FLAGS)
    return affinity.is_asked(server_args) or not all(value is None or value is False for value in given)


def capture_sizes(server_args: Any, sizes: list[int]) -> list[int]:
    """Return the default batch sizes of decode graphs. If the stage is on, add 1 to 16 to SGLang's `sizes`."""
    if not _is_asked(server_args):
        return sizes
    from .compatibility.arguments import is_on

    return sorted({*sizes, *range(1, 17)}) if is_on(server_args) else sizes


def attach(model_runner: Any) -> None:
    """Attach the expert-selection stage to a loaded target model. Do nothing for a draft model."""
    # Check for a draft model first. Before 0.5.20 a draft model shares the arguments of the target model. These
    # arguments contain the target model's plan.
    if model_runner.is_draft_worker or not _is_asked(model_runner.server_args):
        return
    from .compatibility.layers import find_layers

    found = find_layers(model_runner)
    if found is not None:
        from multiprocessing.util import Finalize

        from .live.control import Control
        from .start import start

        global _control, _reports, _stage
        # Finalizers, unlike atexit handlers, also run in a child process of multiprocessing.
        Finalize(None, _close, exitpriority=0)
        _reports = start(model_runner, *found)
        _stage, _control = _reports.stage, Control(_reports, model_runner.server_args)


def choose_depth(worker: Any, upstream: Any) -> Any:
    """Return the function that creates an `AdaptiveSpecPolicy`. This function is SGLang's `upstream` or our own."""
    if not _is_asked(worker.server_args):
        return upstream
    from .depth import is_on
    from .upstream.server import resolved

    return partial(_start_depth, worker, upstream) if is_on(resolved(worker.server_args)) else upstream


def _start_depth(worker: Any, upstream: Any, **arguments: Any) -> Any:
    from .depth.start import start

    global _depth
    _depth = start(worker, upstream(**arguments), arguments["initial_steps"], _stage)
    return _depth.policy


def _close() -> None:
    """Close the reports when the process ends."""
    if _reports is not None:
        _reports.close()


def route(topk_config: Any, router_logits: Any) -> Any:
    """Return the `TopKConfig` for this step. If no policy acts on the layer in this step, return `topk_config`."""
    layer = None if _stage is None else getattr(topk_config, "layer", None)
    return topk_config if layer is None else layer.route(router_logits)


def prepare(topk_config: Any, output_format: Any, router_logits: Any) -> Any:
    """Return the format of the router's output and the router logits [n, N]. See `Layer.prepare`."""
    layer = None if _stage is None else getattr(topk_config, "layer", None)
    return (output_format, router_logits) if layer is None else layer.prepare(output_format, router_logits)


def finish(topk_config: Any, topk_ids: Any, topk_weights: Any, num_token_non_padded: Any = None) -> Any:
    """Return `topk_ids` after rewriting its empty slots for the MoE runner. See `Layer.finish`."""
    layer = None if _stage is None else getattr(topk_config, "layer", None)
    if layer is None or layer.selecting_config is not topk_config:
        return topk_ids
    return layer.finish(topk_ids, topk_weights, num_token_non_padded)


def align(upstream: Callable[..., Any], topk_ids: Any, block_size: int, num_experts: int) -> Any:
    """Return the slots of `topk_ids` sorted by expert. Call `upstream` unless the layer has already sorted them."""
    model_forward = None if _stage is None else _stage.current_frame.model_forward
    made = None if model_forward is None else model_forward.offer
    return handover.align(made, upstream, topk_ids, block_size, num_experts)


def fits_slots(method: Any) -> bool:
    """Return whether this step's experts fit the page slots of `method`, a `PagedExpertsMoEMethod`."""
    return _stage is not None and _stage.fits_slots(method)


def allows_graph(forward_batch: Any) -> bool:
    """Return whether SGLang may replay a captured decode graph for this batch."""
    return _stage is None or _stage.allows_graph(forward_batch)


def capture_limit(server_args: Any, requests: int, top_k: int, num_experts: int, slots: int) -> int:
    """Return the largest batch size of a decode graph with paged experts. SGLang's own limit is `requests`."""
    if not _is_asked(server_args):
        return requests
    from .compatibility.paging import find_limit

    return find_limit(server_args, requests, top_k, num_experts, slots)


def report(reporter: Any) -> str:
    """Update `/metrics` and the trace. Return the end of a decode log line: the counts since the previous line."""
    publish(reporter)
    return ("" if _reports is None else _reports.log()) + ("" if _depth is None else _depth.log())


def publish(reporter: Any) -> None:
    """Update `/metrics` and the trace. An idle server, which writes no log lines, calls only this function."""
    if _reports is not None:
        _reports.reporter = reporter
        _reports.publish()
    if _depth is not None:
        _depth.publish(reporter)


def add_routes(app: Any, find_manager: Any) -> None:
    """Add the routes GET and POST /expert_policy to an app. `find_manager` returns the server's TokenizerManager."""
    from .live.routes import add_routes as add

    add(app, find_manager)


def handle(scheduler: Any, request: Any) -> Any:
    """Answer a control message that a scheduler has received. Return None if SGLang itself must answer."""
    if request.method != METHOD:
        return None
    from .live.control import handle as answer

    if _reports is not None:
        _reports.reporter = scheduler.metrics_reporter
    return answer(_control, _depth, request)


def check_request(manager: Any, sampling_params: Any, request: Any) -> None:
    """Raise ValueError if a request's choice to be exact is wrong, or if this server cannot serve the choice."""
    params, routing_key = sampling_params.custom_params, getattr(request, "routing_key", None)
    is_asked = params is not None and (not isinstance(params, dict) or KEY in params)
    if is_asked or KEY in (routing_key or ""):
        from .compatibility.exact import check_request as check

        check(sampling_params, routing_key, manager.server_args)


def admit(scheduler: Any, req: Any) -> None:
    """Decide whether a new request in a scheduler's queue is exact."""
    if _control is not None:
        _control.warn_if_without_effect()
    if _reports is not None:
        _reports.reporter = scheduler.metrics_reporter
        stage = _reports.stage
        stage.exact.admit(req, stage.in_force.rule, bool(getattr(scheduler, "enable_hicache_storage", False)))


def count(req: Any, logits_output: Any) -> None:
    """Count a finished forward of a request, and the drafts that were accepted in it."""
    if _stage is None:
        return
    _stage.acceptance.count(req)
    forward = getattr(logits_output, metadata.KEY, None)
    if forward is not None:
        metadata.count_forward(req, forward)


def tell(meta_info: dict[str, Any], state: Any) -> None:
    """Write into a request's last `meta_info` which policies were active, and in how many steps they acted."""
    if metadata.KEY in state.customized_info_accumulated:
        metadata.write_metadata(meta_info, state)


def extend(sglext: Any, make: Callable[[], Any], meta_info: dict[str, Any]) -> Any:
    """Return the `sglext` of a response with the counts from `tell`. If `sglext` is None, `make` creates it."""
    told = meta_info.get(metadata.KEY)
    if told is None:
        return sglext
    sglext = make() if sglext is None else sglext
    setattr(sglext, metadata.KEY, told)
    return sglext


def check_exit(code: int | None) -> None:
    """Raise `Refused` if the exit code of a scheduler means that the scheduler has refused its model."""
    from .refusal import REFUSED

    if code == REFUSED:
        refused = Refused("--expert-policy: the scheduler refused the loaded model and printed the reason")
        # The scheduler has printed the reason; exit with status 1 and print nothing more.
        refused.code = 1
        raise refused


def dispatcher(controller: Any) -> Any:
    """Return the function that dispatches requests to replicas, or None if expert-affinity dispatch is off."""
    if not affinity.is_asked(controller.server_args):
        return None
    from .affinity.arguments import make_dispatcher

    return make_dispatcher(controller)


def watch_requests(manager: Any, port_args: Any) -> None:
    """Make a tokenizer manager report finished requests to the controller if expert-affinity dispatch is on.

    `port_args` is not used. Patched trees pass it, and a tree can be older than this package.
    """
    if affinity.is_asked(manager.server_args):
        from .affinity.finished import WatchedRequests, report_end

        manager.rid_to_state = WatchedRequests(manager.rid_to_state, partial(report_end, manager))
