"""What replicas got lately: whose turn of a conversation, and which beginnings of prompts they hold in their cache."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from .table import to_ids

BLOCK = 32
"""Tokens of a block of a prompt."""
BLOCKS = 65_536
"""Blocks remembered a replica: 2 million tokens, more than most KV caches hold."""
HASHED = 1024
"""Blocks of a prompt that are looked at: of 32,768 tokens. Prompts that have so many in common are the same here."""
KEYS = 65_536
"""Conversations remembered."""
SESSIONS = 262_144
"""Sessions remembered, apart from conversations, since these may move and a session may not: 45 MB when full."""


class Recent(OrderedDict[Hashable, int]):
    """Keys with a value each, of which the `most` used latest are kept."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: Hashable, value: int) -> None:
        """Remember a key as the latest."""
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)


class Prefixes:
    """The prompts that each replica got lately, by blocks."""

    def __init__(self, replicas: int) -> None:
        self._blocks = [Recent(BLOCKS) for _ in range(replicas)]

    def match(self, replica: int, blocks: Sequence[int]) -> float:
        """The share of a prompt's blocks, from its first on, that a replica got lately."""
        known = self._blocks[replica]
        count = next((place for place, block in enumerate(blocks) if known.get(block) is None), len(blocks))
        return count / max(len(blocks), 1)

    def add(self, replica: int, blocks: Sequence[int]) -> None:
        """A replica gets a prompt."""
        for block in blocks:
            self._blocks[replica][block] = 0

    def clear(self, replica: int) -> None:
        """A replica has lost its cache."""
        self._blocks[replica] = Recent(BLOCKS)


def hash_blocks(tokens: Sequence[int], salt: Hashable = None) -> list[int]:
    """A number for each full block of the first `HASHED`, of all tokens up to its end. `salt` tells apart prompts that
    share no cache.
    """
    data = to_ids(tokens[: HASHED * BLOCK]).tobytes()
    found = []
    number = hash(salt)
    for start in range(0, len(data) - BLOCK * 8 + 1, BLOCK * 8):  # an id is 8 bytes
        number = hash((number, data[start : start + BLOCK * 8]))
        found.append(number)
    return found
