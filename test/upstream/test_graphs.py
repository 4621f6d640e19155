"""Graphs that are captured again by SGLang's own function, where experts are paged only those that fit their slots."""

from types import SimpleNamespace

import pytest

from sglang_xshare.upstream.graphs import capture_again


class Runner:
    """Notes the sizes that SGLang would capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.decode = SimpleNamespace(bs=[1, 2, 4])
        self.captured: list[list[int]] = []
        self.error = error
        graph = SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=self.decode))
        monkeypatch.setattr("sglang.srt.runtime_context.get_exec", lambda: SimpleNamespace(graph=graph))

    def init_decode_cuda_graph(self) -> None:
        self.captured.append(self.decode.bs)
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("fits", "sizes"),
    [
        (None, [1, 2, 4]),
        (lambda size: size < 3, [1, 2]),
        (lambda size: size < 4, [1, 2, 3]),
        (lambda size: size != 2, [1]),
        (lambda size: False, [1]),
    ],
)
def test_sizes_that_fit_are_captured(fits, sizes, monkeypatch):
    runner = Runner(monkeypatch)
    capture_again(runner, fits)
    assert runner.captured == [sizes]
    assert runner.decode.bs == [1, 2, 4]


def test_a_capture_that_fails_keeps_the_sizes(monkeypatch):
    runner = Runner(monkeypatch, RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        capture_again(runner, lambda size: size == 1)
    assert runner.decode.bs == [1, 2, 4]
