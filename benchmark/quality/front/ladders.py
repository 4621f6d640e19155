"""What is compared: published settings, a ladder of budgets a policy, and what is changed about each."""

from collections.abc import Mapping

LADDERS = {
    "xshare": tuple(f"xshare:k0=1,add={add}" for add in (0, 4, 8, 12, 16)),
    "oea": tuple(f"oea:k0={k0}" for k0 in (2, 3)),
    "moe-spec": tuple(f"moe-spec:budget={budget}" for budget in (16, 24, 32)),
}
PUBLISHED, OWN_SHARE, SQUARED = "published", "own_share 0.75", "own_share 0.75, squared"
CHANGES = {PUBLISHED: "", OWN_SHARE: "own_share=0.75", SQUARED: "own_share=0.75,utility=squared"}
"""Of every setting, by name: keys, in the order in which they are measured."""
SWEEP = {f"own_share {share}": f"own_share={share}" for share in (0.25, 0.5, 1)}
SWEPT_BATCH = 16
SWEPT = ("xshare:k0=1,add=8", "oea:k0=2", "moe-spec:budget=24")
"""Settings that are measured with each of SWEEP too, at one batch size."""
SETTINGS = tuple(setting for ladder in LADDERS.values() for setting in ladder)


def family_of(setting: str) -> str:
    """The policy, whose settings make one curve."""
    return setting.partition(":")[0]


def changes_of(setting: str, batch: int) -> Mapping[str, str]:
    """Name -> the setting so changed, spelt as a policy; the published one comes first.

    What has no budget by utility has no squared one.
    """
    changes = CHANGES | (SWEEP if batch == SWEPT_BATCH and setting in SWEPT else {})
    family = family_of(setting)
    return {
        name: _spell(family, setting.partition(":")[2], keys)
        for name, keys in changes.items()
        if name != SQUARED or family in ("xshare", "moe-spec")
    }


def _spell(policy: str, *keys: str) -> str:
    given = ",".join(filter(None, keys))
    return f"{policy}:{given}" if given else policy
