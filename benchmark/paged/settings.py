"""The policies that are measured with paged experts."""

from typing import Any

from sglang_xshare.policies.spelling import spell_policy

WEIGHTED: dict[str, Any] = {"utility": "squared", "own_share": 0.75}
"""Keys of all, which lose least at equal experts."""


def _spell(**keys: Any) -> str:
    return spell_policy("xshare", {"k0": 1, **keys, **WEIGHTED})


def _by_layer(*adds: int) -> str:
    first, *others = adds
    return _spell(add=first, layers={str(layer): {"add": add} for layer, add in enumerate(others, 1) if add != first})


BLIND = _spell(add=16, free_residents=False), spell_policy("custom", {"budget": 32, **WEIGHTED})
"""Whatever is loaded; the second has the best 32 experts, the least that so many slots of 64 must lose."""
UNIFORM = tuple(_spell(add=add) for add in (4, 2, 1))
BY_LAYER = _by_layer(2, 2, 4, 8), _by_layer(1, 1, 3, 5)
"""The shipped checkpoint loses most in its last layer."""
POLICIES = (*BLIND, *UNIFORM, _spell(add=0, mass=0.95), *BY_LAYER)


def shorten(policy: str) -> str:
    """As a table shows it: without `WEIGHTED`."""
    return policy.replace(",utility=squared,own_share=0.75", "").replace(
        ', "utility": "squared", "own_share": 0.75', ""
    )
