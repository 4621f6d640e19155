"""What is compared: ladders of published settings, and what is changed about each."""

from collections.abc import Mapping

from benchmark.common.variant import parse_variant
from benchmark.quality.model import Layout

POLICIES = ("xshare", "oea", "moe-spec")
PUBLISHED, OWN_SHARE, SQUARED = "published", "own_share 0.75", "own_share 0.75, squared"
CHANGES = {PUBLISHED: "", OWN_SHARE: "own_share=0.75", SQUARED: "own_share=0.75,utility=squared"}
"""Of every setting, by name: keys, in the order in which they are measured."""
SWEEP = {f"own_share {share}": f"own_share={share}" for share in (0.25, 0.5, 1)}
SWEPT_LAYOUT = Layout(16)
"""How the middle setting of each policy is measured with each of SWEEP too."""


def settings_of(num_experts: int, layout: Layout) -> tuple[str, ...]:
    """Published settings in shares of any number of experts, an eighth of which run; verifying, of a request too."""
    plain = layout.tokens_per_request == 1
    rungs = [
        *(f"xshare:k0=1,add={_share(add, num_experts)}" for add in ((0, 4, 8, 12, 16) if plain else (0, 8, 16))),
        *(f"oea:k0={_share(k0, num_experts)}" for k0 in (2, 3, 4)),
        *(f"moe-spec:budget={_share(budget, num_experts)}" for budget in (16, 24, 32)),
    ]
    if not plain:
        rungs += [f"xshare:k0=1,add=0,add_per_request={_share(add, num_experts)}" for add in (2, 4, 6)]
        rungs += [f"moe-spec:budget={_share(budget, num_experts)},scope=request" for budget in (8, 12, 16)]
    return tuple(dict.fromkeys(rungs))


def swept_of(num_experts: int, layout: Layout) -> tuple[str, ...]:
    """The settings that are measured with each of SWEEP too."""
    if layout != SWEPT_LAYOUT:
        return ()
    middle = (("xshare:k0=1,add", 8), ("oea:k0", 2), ("moe-spec:budget", 24))
    return tuple(f"{key}={_share(of_64, num_experts)}" for key, of_64 in middle)


def _share(of_64: int, num_experts: int) -> int:
    """As many of so many experts, and one where that is less."""
    return max(num_experts * of_64 // 64, min(of_64, 1))


def family_of(setting: str) -> str:
    """The policy."""
    return setting.partition(":")[0]


def ladder_of(setting: str) -> str:
    """What makes one curve: the policy, and whether its budget is a request's."""
    keys = parse_variant(setting).keys
    by_request = keys.get("add_per_request") or keys.get("scope") == "request"
    return f"{family_of(setting)}, per request" if by_request else family_of(setting)


def changes_of(setting: str, is_swept: bool = False) -> Mapping[str, str]:
    """Name -> the setting so changed, spelt as a policy, published first; squared only of a budget by utility."""
    changes = CHANGES | (SWEEP if is_swept else {})
    family = family_of(setting)
    return {
        name: _spell(family, setting.partition(":")[2], keys)
        for name, keys in changes.items()
        if name != SQUARED or family in ("xshare", "moe-spec")
    }


def _spell(policy: str, *keys: str) -> str:
    given = ",".join(filter(None, keys))
    return f"{policy}:{given}" if given else policy
