"""A model as the stage sees one: `TopK` configs, a `forward`, a runner. What SGLang would do with them, and no more."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_xshare import hooks
from sglang_xshare.policies.plan import SelectionPlan
from sglang_xshare.policies.schedule import Schedule
from sglang_xshare.stage.acceptance import Acceptance
from sglang_xshare.stage.exact import Exact
from sglang_xshare.stage.forward import wrap_calls, wrap_runner
from sglang_xshare.stage.frame import Assignment, CurrentFrame, Frame, ModelForward
from sglang_xshare.stage.layer import Layer
from sglang_xshare.stage.placement import Placement
from sglang_xshare.stage.record.figures import PREFIX
from sglang_xshare.stage.reports import Reports
from sglang_xshare.stage.stage import Stage
from sglang_xshare.stage.step import Step
from sglang_xshare.upstream.batches import Batches

EXPERTS, TOP_K = 32, 4


def flags(policy: str, **keys: Any) -> dict[str, Any]:
    """The flags of a server with a policy."""
    return {"expert_policy": policy, "expert_policy_config": keys}


XSHARE = flags("xshare", k0=1, add=2)


def stand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the stage's calls to SGLang by the answers for a single rank without a server. test_layer.py and
    test/served/test_serving.py ask every release.
    """
    for name, answer in (
        ("stage.reports.is_first_rank", True),
        ("stage.switch.is_first_rank", True),
        ("stage.layer.scales_unnormalized_groups", False),
        ("upstream.server.show_plan", None),
        ("stage.switch.show_plan", None),
    ):
        monkeypatch.setattr(f"sglang_xshare.{name}", lambda *args, answer=answer: answer)


class Formats(IntEnum):
    """What upstream's `TopK` may hand a runner."""

    STANDARD, TRITON_KERNEL, BYPASSED, PACKED = range(1, 5)


@dataclass
class Config:
    """The fields of upstream's `TopKConfig` that the stage reads."""

    top_k: int = TOP_K
    scoring_func: str = "softmax"
    renormalize: bool = True
    correction_bias: torch.Tensor | None = None
    use_grouped_topk: bool = False
    num_expert_group: int | None = None
    topk_group: int | None = None
    custom_routing_function: Any = None
    routed_scaling_factor: float | None = None
    apply_routed_scaling_factor_on_output: bool = False
    num_fused_shared_experts: int = 0


class Model:
    """MoE layers only: each routes the same logits and keeps what it would hand to its runner, None for vanilla."""

    def __init__(self, num_layers: int = 3) -> None:
        self.configs = [Config() for _ in range(num_layers)]
        self.logits = torch.empty(0, EXPERTS)
        self.routed: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        self.skipped: set[int] = set()
        self.error: Exception | None = None
        self.runner: Any = None
        """The runner that the fixture `attach` has put the stage around."""

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any) -> str:
        """Upstream's signature."""
        self.routed = []
        for number, config in enumerate(self.configs):
            if number not in self.skipped:
                routed = hooks.route(config, self.logits)
                choose = routed.custom_routing_function
                self.routed.append(choose and choose(None, self.logits, routed.top_k, routed.renormalize))
        if self.error:
            raise self.error
        return "output"


def bind(
    model: Any, placement: Placement | None = None, paging: Sequence[Any] | None = None, **options: Any
) -> list[Layer]:
    """The layers of a model, whose routers have the configs that carry them; each with its own `paging`."""
    options |= {"current_frame": CurrentFrame()}
    layers = [
        Layer(n, config, placement, paging=paging and paging[n], index=n, **options)
        for n, config in enumerate(model.configs)
    ]
    model.configs = [layer.plain_config for layer in layers]
    return layers


def make_stage(layers: list[Layer], schedule: Schedule | None, batches: Batches | None = None, **options: Any) -> Stage:
    """A stage that no server has started: it has these batches, and captures nothing."""
    batches = batches or Batches()
    given: dict[str, Any] = {"find_batches": lambda rows: batches, "recapture": lambda *args: None, "device": "cpu"}
    given |= options
    exact = Exact(given["device"])
    return Stage(layers, schedule, exact=exact, acceptance=Acceptance(), **given)


def install(monkeypatch: pytest.MonkeyPatch, model: Model, stage: Stage) -> Stage:
    """Put a stage around a model, as `hooks.attach` does."""
    reports = Reports(stage)
    monkeypatch.setattr(hooks, "_stage", stage)
    monkeypatch.setattr(hooks, "_reports", reports)
    model.runner = runner(model)
    wrap_calls(model.runner, reports)
    return stage


def put_in_step(layer: Layer, plan: SelectionPlan | None, step: Step) -> ModelForward:
    """Put a layer that is alone into a forward in which it has this plan and step."""
    model_forward = ModelForward(step, [Assignment(plan)])
    layer.current_frame.frame = Frame(step.key, "policy", model_forward)
    return model_forward


def forward_batch(mode: str, rows: int, batch_size: int | None = None, padding: int = 0) -> SimpleNamespace:
    """A forward batch; the last `padding` rows are padding. Like upstream's, verify is a kind of extend."""
    slots = torch.arange(1, rows + 1)
    slots[rows - padding :] = 0
    return SimpleNamespace(
        forward_mode=SimpleNamespace(
            is_target_verify=lambda: mode == "verify",
            is_decode=lambda: mode == "decode",
            is_extend=lambda: mode in ("verify", "prefill"),
            is_idle=lambda: mode == "idle",
        ),
        input_ids=torch.zeros(rows, dtype=torch.int64),
        batch_size=batch_size or rows,
        out_cache_loc=slots,
        global_num_tokens_cpu=None,
        spec_info=None,
    )


@dataclass
class Gather:
    """Data-parallel attention on several ranks of one process: a collective that knows every rank's forward batch."""

    batches: list[SimpleNamespace]

    def __call__(self, flags: torch.Tensor, rows: int, forward_batch: SimpleNamespace) -> torch.Tensor:
        """In place of `upstream.gather_rows`: the rows of one rank after another, each as many as it was padded to."""
        assert any(forward_batch is batch for batch in self.batches)
        gathered = torch.cat([batch.out_cache_loc != 0 for batch in self.batches])
        assert len(gathered) == rows
        return gathered


def gathered_batches(
    mode: str, requests: list[int], draft_tokens: int | None = None, longest: bool = True, others: str = "idle"
) -> list[SimpleNamespace]:
    """Forward batches of attention-DP ranks, padded to the longest (MAX_LEN) or not (SUM_LEN), idle in `others`."""
    tokens = draft_tokens or 1
    rows_by_rank = [tokens * (max(requests) if longest else count) for count in requests]
    verify = SimpleNamespace(draft_token_num=draft_tokens, is_verify_input=lambda: True)
    batches = []
    for count, rows in zip(requests, rows_by_rank, strict=True):
        batch = forward_batch(mode if count else others, rows, rows // tokens, padding=rows - tokens * count)
        batch.global_num_tokens_cpu = rows_by_rank
        batch.is_extend_in_batch = "prefill" in (mode, others)
        batch.spec_info = verify if draft_tokens else None
        batches.append(batch)
    return batches


def runner(model: Model, device: str = "cpu", is_draft_worker: bool = False, **flags: Any) -> SimpleNamespace:
    """A model runner whose server was started with these flags."""
    return SimpleNamespace(
        model=model,
        device=device,
        is_draft_worker=is_draft_worker,
        server_args=SimpleNamespace(**flags),
        forward=lambda *args, **keys: model.forward(None, None, *args, **keys),
    )


def run(model: Model, mode: str, rows: int, alone: bool = False, **batch: int) -> None:
    """A forward of the model's runner on random router logits; of the model `alone` in a capture or a warm-up."""
    forward(model, forward_batch(mode, rows, **batch), alone)


def forward(model: Model, batch: SimpleNamespace, alone: bool = False) -> None:
    """Run a forward of the model's runner on a given forward batch; of the model `alone` as `run` does."""
    rows = len(batch.input_ids)
    model.logits = torch.randn(rows, EXPERTS, generator=torch.Generator().manual_seed(rows))
    call = partial(model.forward, None, None) if alone else model.runner.forward
    assert call(batch) == "output"


def replay(batch: SimpleNamespace, launch: Callable[[], Any] = lambda: None) -> SimpleNamespace:
    """Run a forward of the model runner that calls `launch` instead of the model. Return its logits output."""
    runs = SimpleNamespace(forward=lambda batch: SimpleNamespace(logits_output=SimpleNamespace(launched=launch())))
    reports: Any = hooks._reports
    wrap_runner(runs, reports)
    return runs.forward(batch).logits_output


def find_active(routed: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The experts [N] bool that a runner would load of what a layer routed."""
    weights, ids = routed
    return torch.zeros(EXPERTS, dtype=torch.bool).index_put_((ids[weights > 0].long(),), torch.tensor(True))


def allows_graph(rows: int) -> bool:
    """Return whether a decode graph may be replayed for so many requests. SGLang asks within the runner's forward, and
    about a verification before it too, where the answer must be the same.
    """
    installed: Any = hooks._stage
    batch = forward_batch("decode", rows)
    before = hooks.allows_graph(batch)
    installed.current_frame.frame = installed.begin_forward(batch)
    allowed = hooks.allows_graph(batch)
    installed.current_frame.frame = None
    assert before == allowed
    return allowed


def make_reporter(forwards: int = 0, **changes: Any) -> SimpleNamespace:
    """Upstream's reporter of a scheduler after so many forwards, its own and those it took part in."""
    usual: dict[str, Any] = {"decode_log_interval": 40, "metrics_collector": SimpleNamespace(labels={})}
    usual |= {"current_scheduler_metrics_enabled": True, "is_stats_logging_rank": True}
    scheduler = SimpleNamespace(forward_ct=forwards, weight_updater=SimpleNamespace(offload_tags=set()))
    return SimpleNamespace(forward_ct_decode=forwards, scheduler=scheduler, **usual | changes)


def outcomes(installed: Any) -> dict[str, int]:
    """Return the number of forwards that a stage has counted, by outcome."""
    return dict(installed.acting.counters.outcomes)


def read_figure(name: str, **labels: str) -> float | None:
    """Return a value of /metrics that the fixture `reporter` has exported, or None."""
    return REGISTRY.get_sample_value(f"{PREFIX}{name}", {"model_name": "fake", **labels})


class RefuseHostData(TorchDispatchMode):
    """Raises where a tensor is made from Python data: on a GPU a copy from the host, which a graph cannot hold."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation is torch.ops.aten.lift_fresh.default and args[0].dim() > 0  # a number alone is no copy
        assert not made, "a tensor made from host data inside a step"
        return operation(*args, **(kwargs or {}))
