"""The checks before a run: each fails in one line, and never with a traceback."""

import pytest

import sglang_xshare
from benchmark.gpu import preflight


def test_a_kernel_that_does_not_compile_is_named_by_experts():
    """Here every launch fails, as that of a kernel that does not compile."""
    with pytest.raises(RuntimeError, match=r"^32 experts: "):
        preflight.CHECKS["compilation-32"]()


def test_our_kernel_is_held_to_the_reference(monkeypatch):
    preflight.check_selection("cpu", "torch")
    original = sglang_xshare.select

    def select(*args, backend):
        found = original(*args, backend=backend)
        if backend != "reference":
            found.topk_ids.masked_fill_(~args[3].valid[:, None], 5)  # padding that routes to an expert
        return found

    monkeypatch.setattr(sglang_xshare, "select", select)
    with pytest.raises(RuntimeError, match="topk_ids of 125 rows in a graph of 128: not the reference's"):
        preflight.check_selection("cpu", "torch")
