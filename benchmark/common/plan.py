"""The plan of a policy as a benchmark's command line spells it."""

from benchmark.common.variant import parse_variant
from sglang_xshare import SelectionPlan
from sglang_xshare.policies import get_policy

BASELINE = "vanilla"


def parse_plan(text: str, speculative: bool = False) -> SelectionPlan:
    """The plan of a policy as the command line spells it (`xshare:k0=1,add=24`); without keys, the published ones.

    Raises ValueError saying what is wrong and what is allowed.
    """
    variant = parse_variant(text)
    policy = get_policy(variant.policy or BASELINE)
    return policy.build(variant.keys or policy.default_keys(speculative))
