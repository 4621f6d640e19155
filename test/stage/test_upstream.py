"""What the stage reads of SGLang: which MoE runners rank the logits themselves, ranks and schedulers."""

from types import SimpleNamespace

import pytest

from sglang_xshare.stage.upstream import attention_dp_size, num_schedulers, ranks_logits

moe = pytest.importorskip("sglang.srt.layers.moe", reason="needs an installed SGLang")
from sglang.srt.layers.moe.topk import TopKConfig, TopKOutputFormat  # noqa: E402


def config(output_format: TopKOutputFormat | None) -> TopKConfig:
    return TopKConfig(top_k=4, renormalize=True, output_format=output_format)


def test_output_formats():
    assert not ranks_logits(config(TopKOutputFormat.STANDARD))
    assert ranks_logits(config(TopKOutputFormat.TRITON_KERNEL))
    with pytest.raises(
        ValueError, match=r"^routing inside the MoE kernel; allowed is a runner with standard or triton"
    ):
        ranks_logits(config(TopKOutputFormat.BYPASSED))


@pytest.mark.parametrize("ranks", [True, False])
def test_a_format_decided_at_the_first_call_is_the_runner_backends(ranks, monkeypatch):
    monkeypatch.setattr(moe, "get_moe_runner_backend", lambda: SimpleNamespace(is_triton_kernels=lambda: ranks))
    assert ranks_logits(config(None)) == ranks


@pytest.mark.parametrize(
    ("config", "ranks", "schedulers"),
    [
        ({"dp_size": 1}, 1, 1),
        ({"dp_size": 2, "enable_dp_attention": False}, 1, 2),
        ({"dp_size": 2, "enable_dp_attention": True}, 2, 2),
        ({"dp_size": 1, "attn_dp_size": 4, "enable_dp_attention": False}, 4, 4),
        ({"dp_size": 2, "attn_dp_size": 2, "enable_dp_attention": True}, 2, 2),
    ],
)
def test_ranks_are_told_from_replicas(config, ranks, schedulers):
    assert attention_dp_size(SimpleNamespace(**config)) == ranks
    assert num_schedulers(SimpleNamespace(**config)) == schedulers
