"""Wrappers that call the stage in every forward of a loaded model."""

import functools
from typing import Any

from ..upstream.routing import list_routers
from .record.metadata import KEY
from .reports import Reports
from .stage import Stage
from .switch import compare_ranks


def wrap_calls(model_runner: Any, reports: Reports) -> None:
    """Wrap a loaded model and its model runner. The wrappers call the stage and update its reports."""
    stage = reports.stage
    wrap_model(model_runner.model, stage)
    wrap_runner(model_runner, reports)
    for router in list_routers(model_runner.model) if stage.in_force.ranks is not None else ():
        wrap_router(router, stage)


def wrap_model(model: Any, stage: Stage) -> None:
    """Wrap `model.forward`, so the stage runs it in eager steps and captures. A graph replay does not call it."""
    forward = model.forward

    @functools.wraps(forward)  # upstream inspects the signature for pipeline parallelism
    def forward_with_policy(*args: Any, **kwargs: Any) -> Any:
        forward_batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
        return stage.run(forward_batch, functools.partial(forward, *args, **kwargs))

    model.forward = forward_with_policy


def wrap_runner(model_runner: Any, reports: Reports) -> None:
    """Wrap `ModelRunner.forward`: prepare the stage before each forward, and update its reports afterwards.

    SGLang calls `ModelRunner.forward` in every step. It does so even for a graph replay, which does not call the
    model's forward. The ranks compare their selections here, outside of CUDA graphs. The record of the forward is
    attached to the output logits. The scheduler finds it there and counts it for each request.
    """
    stage, forward = reports.stage, model_runner.forward
    slot = stage.current_frame

    @functools.wraps(forward)
    def forward_and_count(*args: Any, **kwargs: Any) -> Any:
        forward_batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[0]
        slot.frame = frame = stage.begin_forward(forward_batch)
        try:
            output = forward(*args, **kwargs)
            counted = stage.end_forward(forward_batch, frame)
        finally:
            slot.frame = None
        reports.publish_if_due(forward_batch)
        compare_ranks(reports)
        logits_output = getattr(output, "logits_output", None)
        if counted is not None and logits_output is not None:
            setattr(logits_output, KEY, counted)
        return output

    model_runner.forward = forward_and_count


def wrap_router(router: Any, stage: Stage) -> None:
    """Wrap `TopK.empty_topk_output`. A rank without rows must join the gather, because the other ranks wait for it."""
    answer_empty = router.empty_topk_output

    def select_and_answer(*args: Any, **kwargs: Any) -> Any:
        layer, ranks = getattr(router.topk_config, "layer", None), stage.in_force.ranks
        if layer is not None and ranks is not None:
            layer.join(ranks.num_experts, stage.device)
        return answer_empty(*args, **kwargs)

    router.empty_topk_output = select_and_answer
