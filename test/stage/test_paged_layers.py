"""Upstream's paged experts, two kernels in plain torch: what the device decides, right or beyond the bound."""

from types import SimpleNamespace

import pytest
import torch

from sglang_xshare import hooks
from sglang_xshare.stage.paged import SlotsExceeded
from sglang_xshare.stage.record.counters import Reader
from stage.contracts import CONFIG, run_native
from stage.fake import EXPERTS, TOP_K, Model, forward_batch
from stage.paged_model import LAYERS, REPORTER, SLOTS, make_schedule, put
from stage.switching import switch

HIDDEN, WIDTH = 16, 8


def decide(topk, step, slot_expert, expert_slot, slot_lastuse, src, dst, count):
    """paged_experts_decide_kernel of paged_experts.cuh: an expert that finds no slot is left out."""
    step += 1
    now, found = int(step), 0
    for expert in topk.tolist():
        if expert >= 0 and expert_slot[expert] >= 0:
            slot_lastuse[expert_slot[expert]] = now
    for expert in topk.tolist():
        if expert < 0 or expert_slot[expert] >= 0:
            continue
        free = [(int(used), slot) for slot, used in enumerate(slot_lastuse) if used != now]
        if not free:
            continue
        victim = min(free)[1]
        if slot_expert[victim] >= 0:
            expert_slot[slot_expert[victim]] = -1
        slot_expert[victim], expert_slot[expert], slot_lastuse[victim] = expert, victim, now
        src[found], dst[found] = expert, victim
        found += 1
    count.fill_(found)


class PagedLayer:
    """An MoE layer whose experts are paged by upstream's method, and the same without paging."""

    def __init__(self, monkeypatch):
        from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
        from sglang.srt.layers.moe.paged_experts import executor, method, residency, runners, store
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput, StandardDispatchOutput
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        self.calls, self.paged = [], 0
        names = {"w13_weight": (2 * WIDTH, HIDDEN), "w2_weight": (HIDDEN, WIDTH)}
        whole = {name: torch.randn(EXPERTS, *shape) for name, shape in names.items()}
        slots = {
            name: torch.nn.Parameter(weight[:SLOTS].clone(), requires_grad=False) for name, weight in whole.items()
        }
        self.layer = SimpleNamespace(num_local_experts=SLOTS, **slots)
        config = SimpleNamespace(**CONFIG, no_combine_keep_router_weight=True)

        def apply(layer, dispatch_output):
            out = moe_forward_native(layer, dispatch_output.hidden_states, dispatch_output.topk_output, config)
            return StandardCombineInput(hidden_states=out)

        base = SimpleNamespace(apply=apply)
        self.method = method.PagedExpertsMoEMethod(base, None, EXPERTS, SLOTS, graphs=True)
        held = store.HostExpertStore(self.layer, list(names), EXPERTS)
        for name, weight in whole.items():
            held.host[name].copy_(weight)
        held.gather = self.gather
        state = residency.DeviceResidency(EXPERTS, SLOTS, "cpu")
        common = {"base_method": base, "store": held, "contract": runners.NATIVE, "routed_scaling_factor": 1.0}
        self.store, self.state = held, state
        self.method.device_executor = executor.DeviceExecutor(residency=state, **common)
        self.method.executor = executor.EagerExecutor(
            policy=self.method.policy, num_experts=EXPERTS, device_residency=state, **common
        )
        for kind in ("device_executor", "executor"):
            self.spy(kind)
        page_in = held.page_in
        held.page_in = lambda layer, loads: (setattr(self, "paged", self.paged + len(loads)), page_in(layer, loads))
        self.run_unpaged = lambda rows, weights, ids: run_native(rows, ids, weights, *whole.values())
        self.dispatch = lambda rows, weights, ids: StandardDispatchOutput(
            hidden_states=rows, hidden_states_scale=None, topk_output=StandardTopKOutput(weights, ids, None)
        )

    def spy(self, kind):
        """Note which executor a step goes to."""
        run = getattr(self.method, kind).run
        getattr(self.method, kind).run = lambda **options: (self.calls.append(kind), run(**options))[1]

    def gather(self, src, dst, count):
        """paged_experts_gather_kernel."""
        self.paged += int(count)
        for name, host in self.store.host.items():
            for expert, slot in zip(src[:count].tolist(), dst[:count].tolist(), strict=True):
                getattr(self.layer, name).data[slot] = host[expert]

    def __call__(self, rows, weights, ids):
        return self.method.apply(self.layer, self.dispatch(rows, weights, ids)).hidden_states


class PagedModel(Model):
    """Layers of them, each on the same rows; `worst` is how far an output was off."""

    def __init__(self, monkeypatch):
        super().__init__(LAYERS)
        monkeypatch.setattr("sglang.kernels.ops.moe.paged_experts.paged_experts_decide", decide)
        self.blocks = [PagedLayer(monkeypatch) for _ in range(LAYERS)]
        self.paging = [block.method for block in self.blocks]
        self.worst = 0.0

    def forward(self, input_ids, positions, batch):
        scores = self.logits.softmax(-1).topk(TOP_K)
        for config, block in zip(self.configs, self.blocks, strict=True):
            block.calls.clear()
            choose = hooks.route(config, self.logits).custom_routing_function
            own = scores.values / scores.values.sum(-1, keepdim=True), scores.indices.int()
            weights, ids = choose(None, self.logits, TOP_K, True) if choose else own
            rows = torch.randn(len(ids), HIDDEN, generator=torch.Generator().manual_seed(len(ids)))
            error = (block(rows, weights, ids) - block.run_unpaged(rows, weights, ids)).abs().max()
            self.worst = max(self.worst, float(error))
        return "output"


@pytest.fixture
def model(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return PagedModel(monkeypatch)


def decode(model, step, rows, mode="decode"):
    """The executor that ran a step of correlated logits."""
    taste = 2 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(step // 5))
    model.logits = taste + torch.randn(rows, EXPERTS, generator=torch.Generator().manual_seed(100 + step))
    model.forward(None, None, forward_batch(mode, rows))
    [kind] = {call for block in model.blocks for call in block.calls}
    return kind


def test_the_device_decides_every_step_that_fits(monkeypatch, model):
    """SGLang alone gives it up to 3 rows of top-4."""
    stage = put(monkeypatch, model, k0=1, add=2)
    for step, rows in enumerate([1, 12, 5, 8, 2, 12, 3, 9] * 2):
        assert decode(model, step, rows) == "device_executor"
    counted = Reader(stage.acting.counters).read()
    assert counted.page_ins == sum(block.paged for block in model.blocks) > 0
    assert counted.page_ins < counted.page_ins_before
    assert model.worst < 1e-4
    hooks.publish(REPORTER)


def test_waves_take_the_others_and_both_keep_one_state(monkeypatch, model):
    stage = put(monkeypatch, model, k0=1, add=4)
    for step, (rows, mode, kind) in enumerate(
        [
            (12, "decode", "device_executor"),
            (13, "decode", "executor"),
            (30, "prefill", "executor"),
            (6, "decode", "device_executor"),
            (3, "prefill", "device_executor"),
            (12, "decode", "device_executor"),
        ]
    ):
        before = [block.state.expert_slot >= 0 for block in model.blocks]
        assert decode(model, step, rows, mode) == kind
        if mode == "decode":
            assert torch.equal(stage.paged.residents.loaded, torch.stack(before))
    switch(stage, None, REPORTER)
    assert (decode(model, 9, 8), decode(model, 9, 3)) == ("executor", "device_executor")
    switch(stage, make_schedule("xshare", k0=1, add=4), REPORTER)
    assert decode(model, 9, 8) == "device_executor"
    assert model.worst < 1e-4


def test_a_broken_bound_drops_an_expert_and_stops_the_server(monkeypatch, model):
    """Nothing but the counter tells: SGLang goes on with a wrong answer."""
    put(monkeypatch, model, k0=3, add=4)
    monkeypatch.setattr("sglang_xshare.policies.bounds.fits_slots", lambda *place: True)
    assert decode(model, 0, 40) == "device_executor"
    assert model.worst > 0.1
    with pytest.raises(SlotsExceeded):
        hooks.publish(REPORTER)
