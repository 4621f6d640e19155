"""Plans that a backend can compute: each backend declares the keys and the words, such as rankings, that it reads."""

from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module

from ..policies.keys import as_json
from ..policies.plan import SelectionPlan

Handled = Mapping[str, tuple[str, ...]]
"""Key of a plan -> the key's words that a backend implements, such as rankings; () for a key of numbers."""


def declare(keys: str, **words: str) -> Handled:
    """Return a declaration: keys of numbers, and the words of each other key."""
    return dict.fromkeys(keys.split(), ()) | {key: tuple(text.split()) for key, text in words.items()}


@lru_cache(maxsize=4096)
def find_unhandled(plan: SelectionPlan, backend: str) -> str:
    """Return the plan's keys that a backend's module would ignore or misread, with values; cached for later steps."""
    keys = plan.keys_beyond(import_module(backend).HANDLED)
    return ", ".join(f"{key} = {as_json(getattr(plan, key))}" for key in keys)


# Words are in the order of the enumerations in csrc/plan.h.
COMMON = declare(
    "k0 p beta add_per_request add mass max_add target_per_rank free_residents acceptance warm_rows "
    "budget drop confidence max_voters min_votes kmax max_rank rescue own_share",
    utility="topk full squared",
    balance="literal fill level",
    ranking="router votes",
    scope="batch",
    coverage="substitute truncate own",
)
"""The keys and words of a plan that all backends read. A backend adds a new key or word to its own `HANDLED`, not here:
a backend that does not implement the key would misread a plan.
"""
FULL = {**COMMON, **declare("order", ranking="router votes static", scope="batch request")}
"""The keys and words that the reference, torch and the compiled CPU call read."""
