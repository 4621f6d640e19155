"""The expert-selection stage inside SGLang: what the patches call.

Importing this module is light (no torch, no SGLang): it is imported by `server_args.py`. With no policy, `route` is one
comparison and every other function returns at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .live import METHOD

if TYPE_CHECKING:
    from .live.control import Control
    from .stage.stage import Stage

_stage: Stage | None = None
_control: Control | None = None


def check_flags(server_args: Any) -> None:
    """Validate the flags and the patched tree, and choose the MoE runner, before SGLang resolves its arguments.

    Raises `ExpertPolicyError`.
    """
    from .admission.arguments import read_arguments

    if getattr(server_args, "expert_placement", None) is not None:
        from .admission.expert_placement import check_flags as check_placement

        check_placement(server_args)
    arguments = read_arguments(server_args)
    if arguments is not None:
        from .admission.backend import choose_runner
        from .admission.flags import list_checks

        for check in list_checks(server_args):
            check()
        choose_runner(server_args, arguments)
    if _mentions_affinity(server_args):
        from .affinity.arguments import check_flags as check_affinity

        check_affinity(server_args)


def check_server(server_args: Any) -> None:
    """Validate the resolved arguments and the model's configuration against the policy, before weights load."""
    from .admission.arguments import read_arguments

    if getattr(server_args, "expert_placement", None) is not None:
        from .admission.expert_placement import check_server as check_placement

        check_placement(server_args)
    arguments = read_arguments(server_args)
    if arguments is not None:
        from .admission.server import check_server as check

        check(server_args, arguments)
    if _mentions_affinity(server_args):
        from .affinity.arguments import check_server as check_affinity

        check_affinity(server_args)


def _mentions_affinity(server_args: Any) -> bool:
    """Whether any flag of expert-affinity dispatch is given."""
    flags = [getattr(server_args, name, None) for name in ("expert_affinity", "expert_affinity_bound")]
    return getattr(server_args, "load_balance_method", None) == "expert_affinity" or flags != [None, None]


def capture_sizes(server_args: Any, sizes: list[int]) -> list[int]:
    """The default decode capture sizes, completed to every batch size up to 16 where the stage is on."""
    from .admission.arguments import read_arguments

    if read_arguments(server_args) is None:
        return sizes
    return sorted({*sizes, *range(1, 17)})


def attach(model_runner: Any) -> None:
    """Put the stage around a loaded target model; a draft model is left alone."""
    from .admission.arguments import read_arguments

    # Before a draft's arguments are read: where releases before 0.5.20 keep one record, it has the target's plan now.
    if model_runner.is_draft_worker:
        return
    arguments = read_arguments(model_runner.server_args)
    if arguments is not None:
        from .admission.all_to_all import read_ranks
        from .admission.layers import find_layers
        from .live.control import Control
        from .stage.batches import read_batches
        from .stage.forward import wrap_calls
        from .stage.stage import Stage
        from .stage.upstream.server import resolved, show_plan

        global _control, _stage
        config, schedule = resolved(model_runner.server_args), arguments.schedule
        _stage = Stage(
            find_layers(model_runner, arguments),
            schedule,
            device=model_runner.device,
            trace=arguments.trace,
            align=arguments.align,
            batches=read_batches(config, schedule.rows if schedule else "batch"),
            masks=bool(getattr(model_runner.server_args, "mask_padding_experts", False)),
            ranks=read_ranks(model_runner, schedule),
            tp_size=getattr(config, "tp_size", 1),
        )
        wrap_calls(model_runner, _stage)
        _control = Control(_stage, model_runner.server_args)
        if _stage.plan is not None:
            show_plan(_stage.plan)


def route(topk_config: Any, router_logits: Any) -> Any:
    """The `TopKConfig` to route with in this step: the policy's for a layer under policy, else the one given."""
    return topk_config if _stage is None else _stage.route(topk_config, router_logits)


def prepare(topk_config: Any, output_format: Any, router_logits: Any) -> Any:
    """(what a layer's router hands its runner, router logits [n, N]): where that runner would rank the logits itself,
    they are masked to the policy's choice, or ids and weights take their place.
    """
    return (
        (output_format, router_logits) if _stage is None else _stage.prepare(topk_config, output_format, router_logits)
    )


def finish(topk_config: Any, topk_ids: Any, topk_weights: Any) -> Any:
    """Ids that upstream has given their places since the policy chose them, as the layer's runner takes empty slots."""
    return topk_ids if _stage is None else _stage.finish(topk_config, topk_ids, topk_weights)


def align(upstream: Any, by_tma: bool) -> Any:
    """SGLang's `moe_align_block_size` for its Triton runner, or a function in its place that returns slots which the
    selection has sorted.

    `by_tma` says that the down projection loads its input by TMA, which takes more of the slots than are in use.
    """
    return upstream if _stage is None else _stage.align(upstream, by_tma)


def report(reporter: Any) -> str:
    """What was counted since the last decode log line, to end this one. Brings `/metrics` and trace up to date."""
    return "" if _stage is None else _stage.report(reporter)


def publish(reporter: Any) -> None:
    """Bring `/metrics` and trace up to date: the server turned idle, and no log line may follow for long."""
    if _stage is not None:
        _stage.publish(reporter)


def add_routes(app: Any, find_manager: Any) -> None:
    """Add GET and POST /expert_policy to the server's app. `find_manager` returns its TokenizerManager."""
    from .live.routes import add_routes as add

    add(app, find_manager)


def handle(scheduler: Any, request: Any) -> Any:
    """The answer to a control message between two steps of a scheduler; None where it is no question of ours."""
    if request.method != METHOD:
        return None
    from .live.control import handle as answer

    return answer(_control, scheduler, request)


def check_exit(code: int | None) -> None:
    """In the server's process, for a scheduler that ended: raise `ExpertPolicyError` where it has refused its model."""
    from .refusal import check_exit as check

    check(code)


def dispatcher(controller: Any) -> Any:
    """What a data-parallel controller sends requests with under `--load-balance-method expert_affinity`; else None."""
    if not _mentions_affinity(controller.server_args):
        return None
    from .affinity.arguments import make_dispatcher

    return make_dispatcher(controller)


def watch_requests(manager: Any, port_args: Any) -> None:
    """Let a tokenizer manager tell the controller which requests have ended, where that dispatches by affinity."""
    if _mentions_affinity(manager.server_args):
        from .affinity.finished import WatchedRequests, open_sender

        manager.rid_to_state = WatchedRequests(manager.rid_to_state, open_sender(port_args.instance_id))
