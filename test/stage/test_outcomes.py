"""How responses name the policy of a forward."""

from types import SimpleNamespace

import pytest

from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.stage.evidence.figures import hash_plan
from sglang_xshare.stage.graphs import Graphs
from sglang_xshare.stage.outcomes import LONGEST, Outcomes
from sglang_xshare.stage.plans import Plans

TUNED = {"k0": 1, "add": 6, "layers": {str(layer): {"add": layer % 5} for layer in range(24)}}


@pytest.mark.parametrize(
    ("keys", "named"), [({"k0": 1, "add": 6}, "xshare:k0=1,add=6"), (TUNED, "xshare, plan {}")], ids=["short", "tuned"]
)
def test_a_policy_is_named_by_its_spelling_or_by_its_hash(keys, named):
    outcomes, plans = Outcomes([], Graphs(())), Plans(build_schedule("xshare", keys, speculative=False))
    plan = plans.describe(8)
    outcomes.adopt(plans, plan)
    outcomes.outcome = "policy"
    policy = outcomes.describe(SimpleNamespace(), None)[0]
    assert policy == named.format(hash_plan(plan))
    assert len(policy) <= LONGEST
