"""The batches a server can have: which sizes an override can meet, and which steps may hold padding."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_xshare.upstream.batches import Batches, list_captured, read_batches
from sglang_xshare.upstream.graphs import list_sizes

GRAPHS = Batches(captured=(*range(1, 17), 24, 32), most=100)


def config(sizes: list[int] | None = None, backend: str = "full", **changes: Any) -> SimpleNamespace:
    decode = SimpleNamespace(bs=sizes, max_bs=sizes and max(sizes), backend=backend)
    known = {
        **{"device": "cuda", "enable_dp_attention": False, "dp_size": 1, "max_running_requests": None},
        **{"speculative_algorithm": "EAGLE3", "speculative_num_draft_tokens": None, "speculative_adaptive": False},
        "cuda_graph_config": SimpleNamespace(decode=decode),
    }
    return SimpleNamespace(**known | changes)


def test_which_sizes_occur():
    """Sizes between captured ones never do. Without graphs every multiple of the draft tokens does."""
    ranges = (16, 23), (17, 23), (17, 24), (33, 33), (100, 200), (101, 200)
    assert [GRAPHS.meet(*sizes) for sizes in ranges] == [True, False, True, True, True, False]
    assert Batches().meet(17, 17)
    assert [Batches(unit=4).meet(2, last) for last in (3, 4)] == [False, True]
    assert not Batches(unit=4, most=8).meet(9, 12)
    assert Batches(captured=(8, 16), most=9).meet(16, 16), "the largest batch is padded to its graph"
    assert not Batches(captured=(8, 16), most=8).meet(9, 16)


def test_a_rank_by_itself_has_its_part_of_the_rows():
    """Of 8 ranks, 2 and 2 of which divide the rows of what they have captured for one of four attention ranks."""
    server = config([2, 4, 8], enable_dp_attention=True, dp_size=4, tp_size=8, moe_a2a_backend="deepep")
    assert read_batches(server).captured == (8, 16, 32)
    own = read_batches(server, "rank")
    assert own.captured == (1, 2, 4)
    assert own.may_pad(4)
    drafts = {"speculative_num_draft_tokens": 3, "max_running_requests": 3}
    half = read_batches(config([2, 4], tp_size=2, moe_a2a_backend="deepep", **drafts), "rank")
    assert half == Batches((3, 6), unit=1, most=5, always_pad=True), "of 9 rows a rank may have 5"


def test_rows_that_ranks_divide_are_padded_to_their_number():
    server = config(tp_size=2, moe_a2a_backend="deepep")
    assert read_batches(server).may_pad(2)
    assert not read_batches(config(tp_size=2, moe_a2a_backend="none")).may_pad(2)


def test_padding_is_where_a_smaller_batch_has_no_graph_of_its_own():
    assert [rows for rows in (1, 2, 16, 24, 32, 33) if GRAPHS.may_pad(rows)] == [24, 32]
    assert [rows for rows in (4, 8, 16) if Batches(captured=(4, 8, 16), unit=4).may_pad(rows)] == [16]
    assert not Batches().may_pad(7)
    assert Batches(always_pad=True).may_pad(7)


def test_what_runs_at_once_has_a_graph_in_place_of_larger_ones():
    ranks = {"enable_dp_attention": True, "dp_size": 2}
    for sizes, changes, captured in (
        ([1, 2, 4, 8, 16, 24, 32], {"max_running_requests": 20}, (1, 2, 4, 8, 16, 20)),
        ([1, 2, 4], {"max_running_requests": 4}, (1, 2, 4)),
        ([1, 2, 4], {"max_running_requests": 20}, (1, 2, 4)),
        ([1, 8], {"max_running_requests": 3, "speculative_num_draft_tokens": 4}, (4, 12)),
        # Two of four ranks share out an attention rank's rows: 3 requests are padded to 4, and 1 has no graph.
        ([1, 2, 8], {"max_running_requests": 7, "tp_size": 4, **ranks}, (4, 8)),
        ([4, 8], {"max_running_requests": 1, "tp_size": 2, **ranks}, (2,)),
        ([1, 2, 4], {"attn_cp_size": 2}, (2, 4)),
    ):
        found = read_batches(config(sizes, **changes))
        assert (changes, found.captured) == (changes, captured)
        assert found.may_pad(20) or 20 not in captured, "17 to 19 rows run in it"


@pytest.mark.parametrize(("requests", "tokens", "divisor"), [(20, 1, 1), (3, 1, 2), (7, 4, 8), (300, 1, 4), (1, 1, 1)])
def test_captured_sizes_are_those_that_sglang_comes_to(requests, tokens, divisor, monkeypatch):
    runner = pytest.importorskip(
        "sglang.srt.model_executor.runner.base_cuda_graph_runner", reason="needs an installed SGLang"
    )
    sizes = [1, 2, 3, 4, 8, 16, 24, 32]
    execution = SimpleNamespace(
        graph=SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(bs=sizes))),
        overlap=SimpleNamespace(enable_two_batch_overlap=False),
    )
    monkeypatch.setattr(runner, "get_exec", lambda: execution)
    monkeypatch.setattr(runner, "get_flags", lambda: SimpleNamespace(capture=SimpleNamespace(enable_torch_compile=0)))
    monkeypatch.setattr(runner.DllmConfig, "from_server_args", lambda server_args: None)
    monkeypatch.setattr(runner, "get_cuda_graph_batch_size_alignment", lambda **required: divisor)
    model_runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(size=requests), server_args=None)
    upstream, _ = runner.get_batch_sizes_to_capture(model_runner, tokens)
    drafts = {"speculative_num_draft_tokens": tokens, "max_running_requests": requests}
    server = config(sizes, tp_size=divisor, moe_a2a_backend="deepep", **drafts)
    assert list_captured(server) == list_sizes(model_runner, server) == upstream


def test_what_a_server_has():
    assert read_batches(config([2, 1])) == Batches((1, 2))
    assert read_batches(config([1, 2], max_running_requests=2)) == Batches((1, 2), most=2)
    assert read_batches(config([1, 2], max_running_requests=9), requests=3, sizes=[1, 3]) == Batches((1, 3), most=3)
    drafts = {"speculative_num_draft_tokens": 4, "max_running_requests": 2}
    assert read_batches(config([1, 2], **drafts)) == Batches((4, 8), unit=4, most=8)
    assert read_batches(config([1, 2], **drafts, enable_return_aux_hidden_states=True)) == Batches((1, 2), most=2)
    ranks = {"enable_dp_attention": True, "tp_size": 2, "dp_size": 2, "max_running_requests": 5}
    assert read_batches(config([1, 2], **ranks)) == Batches((2, 4), most=4, always_pad=True)
    assert read_batches(config([1, 2], device="cpu")) == read_batches(config([1, 2], "disabled")) == Batches()
    assert read_batches(config([1, 2], speculative_adaptive=True)) == Batches(always_pad=True)
    assert read_batches(config(device="cpu", speculative_adaptive=True)) == Batches()
    ranks = {"tp_size": 2, "moe_a2a_backend": "deepep"}
    assert read_batches(config(device="cpu", speculative_adaptive=True, **ranks)) == Batches(always_pad=True)
