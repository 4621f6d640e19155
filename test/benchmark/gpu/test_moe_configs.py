"""The files that are written, read back by upstream's own lookup: tuned where tuned, else as without them."""

import pytest
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config as upstream
from sglang.srt.runtime_context import get_context

from benchmark.gpu.moe_configs import merge, read_upstream, write_files
from benchmark.gpu.moe_layer import SHAPES
from benchmark.gpu.tune import TOKENS

QWEN3, GPT_OSS_120B, GPT_OSS_20B = SHAPES.values()
TUNED = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 256, "GROUP_SIZE_M": 1, "num_warps": 8}


@pytest.fixture
def look_up(monkeypatch):
    """Call it with the folder for $SGLANG_MOE_CONFIG_DIR, or None, for upstream's lookup on a GPU of that name."""

    def read(folder, gpu):
        monkeypatch.setattr(upstream, "get_device_name", lambda: gpu)
        upstream.get_moe_configs.cache_clear()
        monkeypatch.delenv("SGLANG_MOE_CONFIG_DIR", raising=False)
        if folder is not None:
            monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(folder))

        def choose(shape, rows):
            sizes = (shape.experts, 2 * shape.width, shape.hidden), (shape.experts, shape.hidden, shape.width)
            asked = *sizes, shape.top_k, None, rows
            up, (down, _) = upstream.try_get_optimal_moe_config(*asked, return_down_config=True)
            return up, down or up

        return choose

    with get_context().override_server_args():
        yield read
    upstream.get_moe_configs.cache_clear()


@pytest.mark.parametrize(
    ("shape", "gpu"),
    [
        (QWEN3, "NVIDIA H200"),
        (QWEN3, "NVIDIA H100 80GB HBM3"),  # upstream has a file of the down projection there
        (GPT_OSS_120B, "NVIDIA H200"),  # upstream has no file at all
        (GPT_OSS_20B, "NVIDIA H200"),
    ],
    ids=["up", "up and down", "none", "none, 32 experts"],
)
def test_upstream_reads_back_what_was_tuned_and_its_own_above(tmp_path, look_up, shape, gpu):
    own = look_up(None, gpu)
    before = {rows: own(shape, rows) for rows in (*TOKENS, 100, *range(65, 5000))}
    tuned = {rows: TUNED | {"num_stages": rows} for rows in TOKENS} | {4: None}
    files = read_upstream(shape.experts, shape.hidden, shape.width, shape.top_k, TOKENS)
    write_files(tmp_path, merge(files, tuned))
    after = look_up(tmp_path, gpu)
    for rows in TOKENS:
        assert after(shape, rows) == (before[4] if rows == 4 else (tuned[rows], tuned[rows]))
    assert [rows for rows in range(65, 5000) if after(shape, rows) != before[rows]] == []
    assert after(shape, 100)[0]["BLOCK_SIZE_M"] <= after(shape, 4096)[0]["BLOCK_SIZE_M"]
