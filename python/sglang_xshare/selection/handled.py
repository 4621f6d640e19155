"""The keys and words of a plan that each backend reads. A word is the value of a key such as `ranking`."""

from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module

from ..policies.keys import as_json
from ..policies.plan import SelectionPlan

Handled = Mapping[str, tuple[str, ...]]
"""A dict from each key that a backend reads to the words that the backend implements for the key. The tuple is empty if
the key takes numbers.
"""


def declare(keys: str, **words: str) -> Handled:
    """Return the keys and words that a backend reads.

    `keys` lists the keys that take numbers, separated by spaces. `words` lists the words of every other key.
    """
    return dict.fromkeys(keys.split(), ()) | {key: tuple(text.split()) for key, text in words.items()}


@lru_cache(maxsize=4096)
def find_unhandled(plan: SelectionPlan, backend: str) -> str:
    """Return a text with the keys and values of a plan that a backend would ignore or misread.

    `backend` is the name of the backend's module. The result is cached, because every step needs it.
    """
    keys = plan.keys_beyond(import_module(backend).HANDLED)
    return ", ".join(f"{key} = {as_json(getattr(plan, key))}" for key in keys)


# The words are in the order of the enumerations in csrc/plan.h.
COMMON = declare(
    "k0 p beta add_per_request add mass max_add target_per_rank free_residents acceptance warm_rows "
    "budget drop confidence max_voters min_votes kmax max_rank rescue own_share",
    utility="topk full squared",
    balance="literal fill level",
    ranking="router votes",
    scope="batch",
    coverage="substitute truncate own",
)
"""The keys and words of a plan that all backends read. Add a new key or word to the `HANDLED` of each backend that
implements it, not to this dict. Otherwise the other backends would misread a plan.
"""
FULL = {**COMMON, **declare("order", ranking="router votes static", scope="batch request")}
"""The keys and words that the reference, torch and the compiled CPU call read."""
