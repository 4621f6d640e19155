"""Vanilla by a policy's own kernel: the numbers that a captured graph reads after a switch to vanilla."""

import pytest
import torch

from sglang_xshare import Batch, Router, build_plan, select
from sglang_xshare.policies import VANILLA
from sglang_xshare.policies.bounds import open_up
from stage.fake import EXPERTS


@pytest.mark.parametrize(
    ("policy", "keys"),
    [
        ("xshare", {"k0": 1, "add": 1}),
        ("xshare", {"k0": 3, "p": 0.3, "mass": 0.4}),
        ("xshare", {"k0": 1, "add": 1, "warm_rows": 1}),
        ("xshare", {"k0": 1, "add": 1, "acceptance": 0.5}),
        ("lynx-lat", {"retain": 4}),
        ("dynamic-skip", {"beta": 0.9}),
    ],
)
def test_a_plan_that_is_opened_up_routes_as_the_model(policy, keys):
    plan, router, batch = build_plan(policy, **keys), Router(4), Batch(tokens_per_request=4)
    logits = torch.randn(16, EXPERTS, generator=torch.Generator().manual_seed(0))
    expected = select(logits, VANILLA, router, batch)
    assert not torch.equal(select(logits, plan, router, batch).topk_ids, expected.topk_ids)
    found = select(logits, open_up(plan, router), router, batch)
    assert torch.equal(found.topk_ids, expected.topk_ids)
    torch.testing.assert_close(found.topk_weights, expected.topk_weights)
