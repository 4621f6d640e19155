"""The policies, with one file for each paper. To add a policy, register a function in a file that is imported here."""

from . import baselines, xshare, oea, lynx, moe_spec, ours  # noqa: F401, I001 - policies are listed in this order
from .baselines import VANILLA
from .registry import Policy, Setting, build_plan, get_policy, list_policies, register

__all__ = ["VANILLA", "Policy", "Setting", "build_plan", "get_policy", "list_policies", "register"]
