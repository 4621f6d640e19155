"""Recent conversations of replicas, and the beginnings of prompts in the replicas' caches."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import accumulate

from .table import to_ids

BLOCK = 32
"""Tokens of a block, the unit in which prompts are compared."""
BLOCKS = 65_536
"""Remembered blocks of a replica: 2 million tokens, more than most KV caches contain."""
HASHED = 1024
"""Hashed blocks of a prompt: 32,768 tokens. Prompts that share so many tokens count as equal."""
KEYS = 65_536
"""Remembered conversations."""
SESSIONS = 262_144
"""Remembered sessions, 45 MB when full. Conversations may move between replicas, sessions may not."""


class Recent(OrderedDict[Hashable, int]):
    """A mapping that keeps the `most` latest keys."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: Hashable, value: int) -> None:
        """Set a value and make its key the latest."""
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)


class Prefixes:
    """The recent prompts of each replica, as hashes of their blocks."""

    def __init__(self, replicas: int) -> None:
        self._blocks = [Recent(BLOCKS) for _ in range(replicas)]

    def match(self, replica: int, blocks: Sequence[int]) -> float:
        """Return the share of a prompt's `blocks`, up to the first missing block, among a replica's recent blocks."""
        known = self._blocks[replica]
        count = next((place for place, block in enumerate(blocks) if known.get(block) is None), len(blocks))
        return count / max(len(blocks), 1)

    def add(self, replica: int, blocks: Sequence[int]) -> None:
        """Add a prompt to a replica."""
        for block in blocks:
            self._blocks[replica][block] = 0

    def clear(self, replica: int) -> None:
        """Clear a replica's blocks, after the replica has lost its cache."""
        self._blocks[replica] = Recent(BLOCKS)


def hash_blocks(tokens: Sequence[int], salt: Hashable = None) -> list[int]:
    """Return a hash for each of the first `HASHED` full blocks, over `salt` and all tokens up to the block's end."""
    ids = to_ids(tokens[: HASHED * BLOCK])
    blocks = (ids[end - BLOCK : end].tobytes() for end in range(BLOCK, len(ids) + 1, BLOCK))
    return list(accumulate(blocks, lambda number, block: hash((number, block)), initial=hash(salt)))[1:]
