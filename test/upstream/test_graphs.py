"""Graphs that are captured again by SGLang's own function: those of all draft widths, and where experts are paged only
those that fit their slots.
"""

from types import SimpleNamespace

import pytest

from sglang_xshare.upstream.graphs import capture_again, find_largest, keep_sizes, list_sizes


class Runner:
    """Notes the sizes that SGLang would capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decode = SimpleNamespace(bs=[1, 2, 4], max_bs=4)
        self.captured: list[list[int]] = []
        self.error: Exception | None = None
        self.decode_cuda_graph_runner: object | None = object()
        graph = SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=self.decode))
        self.lora = SimpleNamespace(enable_lora=False)
        context = "sglang.srt.runtime_context"
        monkeypatch.setattr(f"{context}.get_exec", lambda: SimpleNamespace(graph=graph))
        monkeypatch.setattr(f"{context}.get_lora", lambda: self.lora)
        monkeypatch.setattr(
            "sglang.srt.model_executor.graph_shared_output.GraphSharedOutput.create_for_model_runner",
            lambda runner: max(runner.decode.bs),
        )

    graph_shared_output = 4

    def init_decode_cuda_graph(self) -> None:
        self.decode_cuda_graph_runner = None
        assert self.graph_shared_output >= max(self.decode.bs), "the logits of each graph fit their buffer"
        self.captured.append(self.decode.bs)
        if self.error is not None:
            raise self.error
        self.decode_cuda_graph_runner = object()


class Worker:
    """SGLang's worker of drafts that adapt: each of its `states` has its own graphs, `steps` is the width in use."""

    def __init__(self, runner: Runner, widths: tuple[int, ...], steps: int) -> None:
        self.runner, self.speculative_num_steps = runner, steps
        states = {width: SimpleNamespace(width=width, target_graph_runner=object()) for width in widths}
        runner.decode_cuda_graph_runner = states[steps].target_graph_runner
        self.adaptive_controller = SimpleNamespace(_states=states)

    @property
    def states(self) -> dict[int, SimpleNamespace]:
        return self.adaptive_controller._states

    def apply_runtime_state(self, state: SimpleNamespace) -> None:
        if state.width != self.speculative_num_steps:
            self.speculative_num_steps = state.width
            self.runner.decode_cuda_graph_runner = state.target_graph_runner


class Replayed:
    """A runner of graphs that may be replayed as far as an expert policy decides: SGLang then reads its next field."""

    def __init__(self, is_draft: bool) -> None:
        self.model_runner = SimpleNamespace(is_draft_worker=is_draft)

    @property
    def ragged_verify_mode(self) -> bool:
        raise LookupError


def test_stale_graphs_of_the_target_do_not_stop_graphs_of_drafts(monkeypatch):
    """DFLASH and DSPARK capture their drafts with the class of the target's runner, at the same sizes."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    monkeypatch.setattr("sglang.srt.expert_policy.allows_graph", lambda forward_batch: False)
    can_run_graph, batch = DecodeCudaGraphRunner.can_run_graph, SimpleNamespace(replace_embeds=None)
    assert can_run_graph(Replayed(is_draft=False), batch) is False
    with pytest.raises(LookupError):
        can_run_graph(Replayed(is_draft=True), batch)


def test_sizes_that_fit_are_captured(monkeypatch):
    for fits, sizes in (
        (None, [1, 2, 4]),
        (lambda size: size < 3, [1, 2]),
        (lambda size: size < 4, [1, 2, 3]),
        (lambda size: size != 2, [1]),
        (lambda size: False, [1]),
    ):
        runner = Runner(monkeypatch)
        capture_again(runner, SimpleNamespace(draft_worker=None), fits)
        # The checks of a POST read the captured sizes from SGLang's list.
        assert (runner.captured, runner.decode.bs) == ([sizes], sizes)
    runner.decode.bs = [1, 2]
    runner.error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        capture_again(runner, SimpleNamespace(), lambda size: size == 1)
    assert runner.decode.bs == [1, 2]


@pytest.mark.parametrize(("enable_lora", "sizes"), [(False, [1, 2, 3]), (True, [1, 2])], ids=["plain", "LoRA"])
def test_graphs_grow_beyond_those_of_the_start(enable_lora, sizes, monkeypatch):
    """At the start SGLang limits its list to the sizes that fit then. LoRA's buffers have the size of that limit."""
    runner = Runner(monkeypatch)
    runner.lora.enable_lora = enable_lora
    assert keep_sizes(runner.decode) == [1, 2, 4]
    runner.decode.bs, runner.decode.max_bs, runner.graph_shared_output = [1, 2], 2, 2
    assert keep_sizes(runner.decode) == [1, 2, 4], "the next layer gets the list from before the limit"
    for least, captured in ((4, sizes), (2, [1]), (4, sizes)):
        assert find_largest(lambda size, least=least: size < least) == captured[-1]
        capture_again(runner, SimpleNamespace(draft_worker=None), lambda size, least=least: size < least)
        assert runner.captured.pop() == captured


def test_the_graphs_of_every_width_are_captured_and_the_width_in_use_stays(monkeypatch):
    runner = Runner(monkeypatch)
    worker = Worker(runner, (2, 0, 1), steps=0)
    former = {state.target_graph_runner for state in worker.states.values()}
    widths: list[int] = []
    capture = runner.init_decode_cuda_graph

    def note() -> None:
        assert all(state.target_graph_runner is None for state in worker.states.values()), "memory is freed first"
        widths.append(worker.speculative_num_steps)
        capture()

    runner.init_decode_cuda_graph = note
    capture_again(runner, SimpleNamespace(draft_worker=worker), lambda size: size < 3)
    assert widths == [2, 1, 0]
    assert runner.captured == [[1, 2]] * 3
    assert worker.speculative_num_steps == 0
    assert runner.decode_cuda_graph_runner is worker.states[0].target_graph_runner
    latter = {state.target_graph_runner for state in worker.states.values()}
    assert len(latter) == 3
    assert not latter & former


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_leaves_no_width_a_graph_of_another_policy(failing, monkeypatch):
    runner = Runner(monkeypatch)
    worker = Worker(runner, (0, 1, 2), steps=1)
    capture = runner.init_decode_cuda_graph

    def fail() -> None:
        runner.error = RuntimeError("out of memory") if worker.speculative_num_steps == failing else None
        capture()

    runner.init_decode_cuda_graph = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        capture_again(runner, SimpleNamespace(draft_worker=worker))
    assert worker.speculative_num_steps == 1
    assert runner.decode_cuda_graph_runner is None
    assert {state.target_graph_runner for state in worker.states.values()} == {None}


def test_without_graphs_no_size_is_captured():
    """SGLang's own list is not there then, and a switch may need the sizes."""
    off = SimpleNamespace(decode=SimpleNamespace(backend="disabled", bs=None))
    for device, graphs in (("cpu", None), ("cuda", None), ("cuda", off)):
        assert list_sizes(None, SimpleNamespace(device=device, cuda_graph_config=graphs)) == []
