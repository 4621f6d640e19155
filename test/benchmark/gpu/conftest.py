"""Fixtures of the tests of the run on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu.recorded import served

from benchmark.gpu import eagle3, memory, replay, server
from sglang_xshare.stage.alignment import TAKEN
from stage.conftest import attach

__all__ = ["attach", "launches_on"]


@dataclass
class Gpu:
    """Its free memory, and the models served there, of how many servers."""

    gib: int = 139
    served: list[tuple[str, int]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.served]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """An H200 whose servers are stand-ins, and rounds measured in no time."""
    one = Gpu()

    @contextmanager
    def serve(name: str, variants: list[Any], *args: Any) -> Iterator[list[SimpleNamespace]]:
        one.served.append((name, len(variants)))
        yield [SimpleNamespace(log_text=lambda: f"... {TAKEN}") for _ in variants]

    def measure_rounds(record: Any, key: str, name: str, *args: Any) -> None:
        point = served(100.0, 110.0, 3.0)
        record.add(key, **point | {"workload": point["workload"] | {"model": Path(name)}})

    monkeypatch.setattr(memory, "read_free_bytes", lambda: one.gib << 30)
    for module in (server, eagle3, replay):
        monkeypatch.setattr(module, "serve_dummies", serve)
        monkeypatch.setattr(module, "measure_rounds", measure_rounds)
    return one


@pytest.fixture
def launches_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Upstream's lookup of launches, with a server's default arguments, on an H200; call it with another GPU's name."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config as upstream
    from sglang.srt.runtime_context import get_context

    def name(gpu: str) -> None:
        monkeypatch.setattr(upstream, "get_device_name", lambda: gpu)
        upstream.get_moe_configs.cache_clear()

    monkeypatch.delenv("SGLANG_MOE_CONFIG_DIR", raising=False)
    with get_context().override_server_args():
        name("NVIDIA H200")
        yield name
    upstream.get_moe_configs.cache_clear()
