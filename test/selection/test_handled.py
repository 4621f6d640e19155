"""Keys and words of a plan that a backend does not know: none of them is read as another one."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch

from refused import refused
from selection.cases import fill_logits
from sglang_xshare import Batch, Router, select
from sglang_xshare.policies.plan import KEYS, SelectionPlan
from sglang_xshare.selection import BACKENDS, cpu_call, prepare_call, triton_kernel
from sglang_xshare.selection.cpu_call.library import load
from sglang_xshare.selection.handled import find_unhandled
from sglang_xshare.selection.triton_kernel import recipe

COMPILED = {"triton": triton_kernel, **({"cpu": cpu_call} if load() is not None else {})}
LEFT_OUT = {"triton": {"order": (), "ranking": ("static",), "scope": ("request",)}}
"""What a backend leaves to torch: a key as a whole, or some of its words."""
NEEDED = {"utility": "add", "balance": "target_per_rank", "ranking": "budget", "scope": "budget", "coverage": "add"}
"""By key of words, another key with which a plan may have one of its words."""
LOGITS, ROUTER, RANKS = fill_logits("ties", 6, 16, 4), Router(4), torch.arange(16) // 4


@pytest.fixture
def forget():
    """Nothing that a plan was found to be under other declarations is left."""

    def clear():
        for cached in (find_unhandled, recipe._serves):
            cached.cache_clear()

    clear()
    yield clear
    clear()


def add_word(monkeypatch, name, word="peak"):
    """Let plans have a further word, as a first step of a change does."""
    monkeypatch.setitem(KEYS, name, replace(KEYS[name], choices=(*KEYS[name].choices, word)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_key_and_word_of_a_plan_is_declared_or_left_out(backend):
    handled, left_out = import_module(BACKENDS[backend]).HANDLED, LEFT_OUT.get(backend, {})
    known = {name: {*words, *left_out.get(name, ())} for name, words in handled.items()}
    known |= {name: set() for name in left_out if name not in handled}
    assert known == {name: set(key.choices) if key.kind is str else set() for name, key in KEYS.items()}
    assert set(NEEDED) == {name for name, key in KEYS.items() if key.kind is str}, "each is tried below"


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("name", NEEDED)
def test_a_word_that_no_compiled_backend_knows_is_left_to_torch(monkeypatch, forget, name, backend):
    plan = SelectionPlan(k0=1, **{NEEDED[name]: 3})
    assert COMPILED[backend].supports(plan, ROUTER, Batch(), 6, 16)
    add_word(monkeypatch, name)
    peak = SelectionPlan(k0=1, **{name: "peak", NEEDED[name]: 3})
    assert not COMPILED[backend].supports(peak, ROUTER, Batch(), 6, 16)
    assert prepare_call(LOGITS, peak, ROUTER, Batch(), None) is None
    with refused(f"{name} = 'peak'"):
        select(LOGITS, peak, ROUTER, None, RANKS, backend)
    # Torch has what the others leave, wherever a batch lies; it refuses a word rather than read it as another one.
    monkeypatch.setattr(torch.Tensor, "is_cuda", backend == "triton", raising=False)
    with pytest.raises(ValueError, match=f"^{name} = 'peak': not implemented by backend torch$"):
        select(LOGITS, peak, ROUTER, None, RANKS)


@pytest.mark.parametrize("backend", COMPILED)
def test_a_key_that_is_not_declared_is_left_to_torch(monkeypatch, forget, backend):
    """Such as one that a later plan has; where it is at its default, the backend serves the plan."""
    handled = {name: words for name, words in COMPILED[backend].HANDLED.items() if name not in ("add", "utility")}
    monkeypatch.setattr(COMPILED[backend], "HANDLED", handled)
    assert COMPILED[backend].supports(SelectionPlan(k0=1, mass=0.5), ROUTER, Batch(), 6, 16)
    for keys in ({"add": 3}, {"mass": 0.5, "utility": "full"}):
        plan = SelectionPlan(k0=1, **keys)
        assert not COMPILED[backend].supports(plan, ROUTER, Batch(), 6, 16)
        with pytest.raises(ValueError, match=f"not implemented by backend {backend}"):
            select(LOGITS, plan, ROUTER, backend=backend)
        select(LOGITS, plan, ROUTER)
