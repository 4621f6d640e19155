"""Divergence from vanilla by the likeliest tokens: the figure that benchmark.quality has, and zero for vanilla."""

import pytest
import torch

from benchmark.quality.measure import Top
from benchmark.quality.measure import diverge as diverge_all
from sglang_xshare.tune.gauge import Gauge, diverge
from sglang_xshare.tune.texts import Sample
from tune.fake import FakeServer


def likeliest(logits, count):
    top = logits.log_softmax(0).topk(count)
    return dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))


@pytest.mark.parametrize("count", [2, 5, 12])
def test_it_is_the_divergence_of_the_benchmark(count):
    torch.manual_seed(count)
    for spread in (0.1, 1.0, 30.0):
        logits = 2 * torch.randn(12)
        pair = [likeliest(one, count) for one in (logits, logits + spread * torch.randn(12))]
        tops = (Top(torch.tensor([[list(one)]]), torch.tensor([[list(one.values())]])) for one in pair)
        wanted = diverge_all(*tops).item()
        assert diverge(*pair) == pytest.approx(wanted, abs=1e-5)


def test_a_policy_is_measured_against_vanilla_on_the_same_samples():
    """Where experts are paged, page-ins are saved."""
    server, policy = FakeServer(), {"policy": "xshare", "k0": 1, "add": 8}
    samples = [Sample([number], [1, 2, 3]) for number in range(5)]
    gauge = Gauge(server, {"tuning": samples})
    found = gauge(policy, 2, "tuning")
    vanilla = gauge({"policy": "vanilla"}, 2, "tuning")
    assert (len(found.nats), found.saved) == (4, 4 * 24)  # the fifth would be alone
    losses = [one - own for one, own in zip(found.nats, vanilla.nats, strict=True)]
    assert found.divergences == pytest.approx(losses, abs=1e-5)
    assert (vanilla.divergences, vanilla.saved) == ([0] * 4, None)
    assert [one["policy"] for one in server.switched] == ["vanilla", "xshare"]
    server.paged = True
    found = gauge(policy, 2, "tuning")
    assert (found.before, found.saved) == (4.0, pytest.approx(4 * 2.4))
