"""`select()` itself: backends, bad input, empty batches, and what its answer and its torch backend promise."""

from dataclasses import fields

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from refused import refused
from selection.cases import spell
from selection.compared import HERE, PLANS
from sglang_xshare import Batch, Router, RunnerSlots, Selection, build_plan, select
from sglang_xshare.selection import BACKENDS

TENSORS = [field.name for field in fields(Selection) if field.name not in ("masked_logits", "alignment")]
XSHARE = spell("xshare:k0=1,add=2")
LOGITS = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
STATIC = {"policy": "moe-spec", "budget": 5, "ranking": "static", "order": list(range(16))}
ALL = [*map(spell, [*PLANS, "moe-spec:budget=5,scope=request"]), build_plan(STATIC)]
EVERY_PLAN = pytest.mark.parametrize("plan", ALL, ids=lambda plan: plan.policy)
EVERY_BACKEND = pytest.mark.parametrize("backend", HERE, indirect=True)


@EVERY_PLAN
@EVERY_BACKEND
def test_an_empty_batch_and_one_of_padding_select_nothing(plan, backend):
    """Of padding alone is a batch while a CUDA graph is captured: every cache location is 0."""
    for rows in (0, 6):
        out = backend(LOGITS[:rows], plan, Router(4), Batch(torch.zeros(rows, dtype=torch.bool), 3), range(16))
        assert out.topk_ids.shape == out.topk_weights.shape == (rows, plan.kmax or 4)
        assert (out.topk_ids == -1).all()
        assert not any(tensor.any() for tensor in (out.topk_weights, out.active, out.kept_mass, out.rescued))
        assert plan.ranking == "static" or not out.selected.any()


class OneDevice(TorchFunctionMode):
    """Refuses an operation on tensors of two devices: on a GPU it copies, waits, or fails."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        operands = tree_leaves((args, kwargs))
        assert len({x.device for x in operands if isinstance(x, torch.Tensor)}) <= 1, function
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("exact", [False, True])
@EVERY_PLAN
def test_the_torch_backend_never_reads_the_device(plan, exact):
    """On the meta device there is nothing to read: any synchronization, or size that depends on data, is an error."""
    device = torch.device("meta")
    flags = torch.ones(6, dtype=torch.bool, device=device)
    batch = Batch(flags, tokens_per_request=3, exact=flags if exact else None)
    router = Router(4, "sigmoid", torch.zeros(16, device=device), num_expert_group=4, topk_group=2)
    ranks = torch.zeros(16, dtype=torch.int64, device=device)
    logits = LOGITS.to(device)
    with OneDevice():
        out = select(logits, plan, router, batch, ranks, backend="torch", slots=RunnerSlots())
        assert all(getattr(out, name).is_meta for name in TENSORS)


@EVERY_PLAN
@EVERY_BACKEND
def test_the_answer_is_ordinary_and_the_callers(plan, backend):
    """A caller may change the answer in place, and gets the same one again; later changes of the input, as in a
    graph's buffers, change no answer.
    """
    logits, valid = LOGITS.clone(), torch.tensor([True, False, True, True, False, True])
    call = plan, Router(4), Batch(valid, 3, torch.arange(6) == 3), range(16)
    first, second = (backend(logits, *call) for _ in range(2))
    kept = {name: getattr(second, name).clone() for name in TENSORS}
    for name in TENSORS:
        tensor = getattr(first, name)
        assert torch.equal(tensor, kept[name]), name
        assert not tensor.is_inference(), name
        tensor.zero_()
    assert torch.equal(logits, LOGITS)
    logits.zero_()
    valid.zero_()
    assert all(torch.equal(getattr(second, name), kept[name]) for name in TENSORS)


def test_every_backend_is_listed_and_auto_is_torch_if_nothing_is_compiled(monkeypatch):
    called = []
    monkeypatch.setattr("sglang_xshare.selection.cpu_call.supports", lambda *args: False)
    monkeypatch.setitem(BACKENDS, "torch", "sglang_xshare.selection.reference")
    monkeypatch.setattr("sglang_xshare.selection.reference.select", lambda *args: called.append(args))
    select(LOGITS, XSHARE, Router(4))
    assert len(called) == 1
    with pytest.raises(ValueError, match="backend = 'cuda': must be"):
        select(LOGITS, XSHARE, Router(4), backend="cuda")


FLAGS, META = torch.ones(6, dtype=torch.bool), torch.device("meta")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"router_logits": LOGITS[0]}, "router_logits float32 [16]"),
        ({"router_logits": LOGITS.long()}, "router_logits int64 [6, 16]"),
        ({"router_logits": torch.zeros(2, 1025)}, "router_logits float32 [2, 1025]"),
        ({"router_logits": torch.zeros(2, 0)}, "router_logits float32 [2, 0]"),
        ({"batch": Batch(FLAGS[:5])}, "valid bool [5]"),
        ({"batch": Batch(FLAGS.float())}, "valid float32 [6]"),
        ({"batch": Batch(exact=FLAGS[:5])}, "exact bool [5]"),
        ({"batch": Batch(resident=FLAGS)}, "resident bool [6]"),
        ({"batch": Batch(depth=torch.zeros(5, dtype=torch.int32))}, "depth int32 [5]"),
        ({"batch": Batch(depth=torch.zeros(6))}, "depth float32 [6]"),
        ({"batch": Batch(None, 4)}, "tokens_per_request = 4"),
        ({"batch": Batch(FLAGS.to(META))}, "valid on meta"),
        ({"router": Router(4, "sigmoid", torch.zeros(8))}, "correction_bias float32 [8]"),
        ({"router": Router(4, "sigmoid", torch.zeros(16, device=META))}, "correction_bias on meta"),
        ({"router": Router(4, expert_scale=torch.zeros(8))}, "expert_scale float32 [8]"),
        ({"router": Router(5, quota_groups=5)}, "quota_groups = 5"),
        ({"router": Router(4, quota_groups=2), "plan": spell("oea:k0=2,kmax=6")}, "kmax = 6"),
        ({"router": Router(17)}, "top_k = 17"),
        ({"router": Router(4, num_expert_group=3, topk_group=1)}, "num_expert_group = 3"),
        ({"rank_of_expert": [0] * 8}, "rank_of_expert int64 [8]"),
        ({"rank_of_expert": [0.0] * 16}, "rank_of_expert float32 [16]"),
        ({"rank_of_expert": torch.zeros(16, dtype=torch.complex64)}, "rank_of_expert complex64 [16]"),
        ({"rank_of_expert": torch.nn.Parameter(torch.arange(16) - 1, False)}, "rank_of_expert from -1 to 14"),
        ({"rank_of_expert": torch.full((16,), 16, dtype=torch.uint32)}, "rank_of_expert from 16 to 16"),
        ({"rank_of_expert": [0] * 15 + [2**60]}, f"rank_of_expert from 0 to {2**60}"),
        ({"plan": spell("oea:k0=5")}, "k0 = 5"),
        ({"plan": spell("xshare:target_per_rank=2")}, "target_per_rank = 2"),
        ({"plan": build_plan("custom", k0=None, kmax=3)}, "kmax = 3"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_bad_input_is_one_clear_line(change, line):
    arguments = {"router_logits": LOGITS, "plan": XSHARE, "router": Router(4), **change}
    with refused(line):
        select(**arguments)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Router(0), "top_k = 0"),
        (lambda: Router(True), "top_k = True"),
        (lambda: Router(4, "relu"), "scoring = 'relu'"),
        (lambda: Router(4, quota_groups=3), "quota_groups = 3"),
        (lambda: Router(4, quota_groups=2, num_expert_group=2, topk_group=1), "quota_groups = 2"),
        (lambda: Router(4, quota_groups=0), "quota_groups = 0"),
        (lambda: Router(4, num_expert_group=0, topk_group=1), "num_expert_group = 0"),
        (lambda: Router(4, num_expert_group=2, topk_group=0), "topk_group = 0"),
        (lambda: Router(4, num_expert_group=2), "num_expert_group = 2, topk_group = None"),
        *((lambda scaling=one: Router(8, scaling=scaling), "scaling = ") for one in (0, -1.0, float("nan"), True)),
        (lambda: Router(8, scaling=float("inf")), "scaling = "),
        (lambda: Batch(None, 0), "tokens_per_request = 0"),
        (lambda: Batch(slots=0), "slots = 0"),
        (lambda: RunnerSlots(shared=-1), "shared = -1"),
        (lambda: RunnerSlots(empty=True, masked=True), "empty = True"),
        (lambda: RunnerSlots(shared=1, masked=True), "masked = True"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_router_a_batch_and_slots_check_themselves(make, line):
    with pytest.raises(ValueError, match=f"^{line}") as raised:
        make()
    assert "\n" not in str(raised.value)
