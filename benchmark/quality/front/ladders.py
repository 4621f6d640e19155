"""Published settings of policies, and the changes that are compared with each setting.

A ladder is a list of settings of one policy that differ only in their budget.
"""

from collections.abc import Mapping

from benchmark.common.variant import parse_variant
from benchmark.quality.model import Layout

POLICIES = ("xshare", "oea", "moe-spec")
PUBLISHED, OWN_SHARE, SQUARED = "published", "own_share 0.75", "own_share 0.75, squared"
CHANGES = {PUBLISHED: "", OWN_SHARE: "own_share=0.75", SQUARED: "own_share=0.75,utility=squared"}
"""The changes in the order of measurement. A change adds keys to a setting."""
SWEEP = {f"own_share {share}": f"own_share={share}" for share in (0.25, 0.5, 1)}
SWEPT_LAYOUT = Layout(16)
"""The layout that is also measured with the changes of `SWEEP`. Only the middle setting of each policy is used."""


def settings_of(num_experts: int, layout: Layout) -> tuple[str, ...]:
    """Return the published settings for this number of experts. Verify steps also have settings with request budgets.

    The settings are given for 64 experts, and are scaled to `num_experts`.
    """
    plain = layout.tokens_per_request == 1
    rungs = [
        *(f"xshare:k0=1,add={_scale(add, num_experts)}" for add in ((0, 4, 8, 12, 16) if plain else (0, 8, 16))),
        *(f"oea:k0={_scale(k0, num_experts)}" for k0 in (2, 3, 4)),
        *(f"moe-spec:budget={_scale(budget, num_experts)}" for budget in (16, 24, 32)),
    ]
    if not plain:
        rungs += [f"xshare:k0=1,add=0,add_per_request={_scale(add, num_experts)}" for add in (2, 4, 6)]
        rungs += [f"moe-spec:budget={_scale(budget, num_experts)},scope=request" for budget in (8, 12, 16)]
    return tuple(dict.fromkeys(rungs))


def swept_of(num_experts: int, layout: Layout) -> tuple[str, ...]:
    """Return the settings that are also measured with the changes of `SWEEP`."""
    middle = (("xshare:k0=1,add", 8), ("oea:k0", 2), ("moe-spec:budget", 24))
    return tuple(f"{key}={_scale(of_64, num_experts)}" for key, of_64 in middle) if layout == SWEPT_LAYOUT else ()


def _scale(of_64: int, num_experts: int) -> int:
    return max(num_experts * of_64 // 64, min(of_64, 1))


def family_of(setting: str) -> str:
    """Return the name of the setting's policy."""
    return setting.partition(":")[0]


def ladder_of(setting: str) -> str:
    """Return the name of the setting's ladder. Settings with a budget per request form a ladder of their own."""
    keys = parse_variant(setting).keys
    by_request = keys.get("add_per_request") or keys.get("scope") == "request"
    return f"{family_of(setting)}, per request" if by_request else family_of(setting)


def changes_of(setting: str, is_swept: bool = False) -> Mapping[str, str]:
    """Return a dict from each change to the changed policy. The published policy comes first.

    Squared utilities are omitted for policies without a budget by utility.
    """
    family, _, own = setting.partition(":")
    return {
        name: f"{family}:{','.join(filter(None, (own, keys)))}".rstrip(":")
        for name, keys in (CHANGES | (SWEEP if is_swept else {})).items()
        if name != SQUARED or family in ("xshare", "moe-spec")
    }
