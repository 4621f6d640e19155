"""Fixtures of the tests of the run on a GPU."""

from collections.abc import Callable, Iterator

import pytest

from stage.conftest import attach

__all__ = ["attach", "launches_on"]


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
