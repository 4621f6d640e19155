"""A model whose experts are paged into slots, without SGLang, and a stage around it."""

from collections import OrderedDict
from types import SimpleNamespace

import torch

from sglang_xshare import hooks
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.upstream.batches import Batches
from sglang_xshare.upstream.graphs import find_cap
from sglang_xshare.upstream.paging import find_paging
from stage.fake import EXPERTS, TOP_K, Model, bind, forward_batch, install, make_reporter, make_stage, stand_alone

SLOTS, LAYERS = 12, 3
REPORTER = make_reporter(1, current_scheduler_metrics_enabled=False)


class Paging:
    """What the stage reads of upstream's `PagedExpertsMoEMethod`, with its least-recently-used slots."""

    def __init__(self, slots=SLOTS):
        self.num_resident, self.num_experts = slots, EXPERTS
        self.policy = SimpleNamespace(resident=OrderedDict((expert, expert) for expert in range(slots)))
        self.device_executor = None
        self.loads = 0

    def place(self, experts):
        """As upstream's waves do: each expert that is not loaded is paged in once."""
        resident = self.policy.resident
        wanted = [e for e in experts if e in resident] + [e for e in experts if e not in resident]
        for first in range(0, len(wanted), self.num_resident):
            wave = wanted[first : first + self.num_resident]
            for expert in [e for e in wave if e in resident]:
                resident.move_to_end(expert)
            for expert in [e for e in wave if e not in resident]:
                resident[expert] = resident.popitem(last=False)[1]
                self.loads += 1


class PagedModel(Model):
    """A model whose layers page in what was routed; it keeps what was loaded before, and what vanilla would page in."""

    def __init__(self, slots=SLOTS):
        super().__init__(LAYERS)
        self.paging = [Paging(slots) for _ in range(LAYERS)]
        self.before = 0
        self.loaded = []

    def forward(self, input_ids, positions, batch):
        self.routed, self.loaded = [], []
        own = self.logits.topk(TOP_K).indices
        for config, paging in zip(self.configs, self.paging, strict=True):
            loaded = torch.zeros(EXPERTS, dtype=torch.bool)
            loaded[list(paging.policy.resident)] = True
            self.loaded.append(loaded)
            self.before += int((~loaded[own.unique()]).sum())
            routed = hooks.route(config, self.logits)
            choose = routed.custom_routing_function
            answer = choose and choose(None, self.logits, TOP_K, True)
            ids = own if answer is None else answer[1]
            self.routed.append(answer)
            paging.place(ids.unique().tolist())
        return "output"


def put(monkeypatch, model, policy="xshare", trace=None, device="cpu", **keys):
    """A stage around a paged model; its schedule is as a server that pages experts builds it."""
    stand_alone(monkeypatch)
    paging = [find_paging(SimpleNamespace(quant_method=paging)) for paging in model.paging]
    schedule, batches = make_schedule(policy, **keys), Batches(captured=(1, 2, 4, 8))
    layers = bind(model, paging=paging)
    stage = make_stage(layers, schedule, batches, device=device, trace=trace)
    monkeypatch.setattr(
        "sglang_xshare.stage.switch.find_largest", lambda fits: find_cap(stage.find_batches("batch").captured[-1], fits)
    )
    return install(monkeypatch, model, stage)


def page(monkeypatch, *policy, **options):
    """Return a new paged model and the stage that `put` makes around it."""
    model = PagedModel()
    return model, put(monkeypatch, model, *policy, **options)


def make_schedule(policy, **keys):
    return build_schedule(policy, keys, speculative=False, pages=True)


def decode(model, step, rows):
    """A step of correlated logits: what is loaded matters."""
    taste = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(step // 5))
    model.logits = taste + torch.randn(rows, EXPERTS, generator=torch.Generator().manual_seed(100 + step))
    model.runner.forward(forward_batch("decode", rows))
