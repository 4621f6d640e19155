"""The recent conversations and prompts of each replica."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import accumulate

from .table import to_ids

BLOCK = 32
"""The number of tokens in a block. Prompts are compared block by block."""
BLOCKS = 65_536
"""The most blocks that are remembered for a replica. They contain 2 million tokens, more than most KV caches do."""
HASHED = 1024
"""The most blocks of a prompt that are hashed. They contain 32,768 tokens. Prompts that share all of these tokens count
as equal.
"""
KEYS = 65_536
"""The most conversations that are remembered."""
SESSIONS = 262_144
"""The most sessions that are remembered. They take 45 MB. More sessions than conversations are remembered, because a
session cannot move to another replica.
"""


class Recent(OrderedDict[Hashable, int]):
    """A mapping that removes its oldest key if it has more than `most` keys."""

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
    """The recent prompts of each replica, stored as hashes of their blocks."""

    def __init__(self, replicas: int) -> None:
        self._blocks = [Recent(BLOCKS) for _ in range(replicas)]

    def match(self, replica: int, blocks: Sequence[int]) -> float:
        """Return the share of a prompt's `blocks` that a replica has recently received.

        Only the blocks before the first missing block count.
        """
        known = self._blocks[replica]
        count = next((place for place, block in enumerate(blocks) if known.get(block) is None), len(blocks))
        return count / max(len(blocks), 1)

    def add(self, replica: int, blocks: Sequence[int]) -> None:
        """Add the blocks of a prompt to a replica."""
        for block in blocks:
            self._blocks[replica][block] = 0

    def clear(self, replica: int) -> None:
        """Remove all blocks of a replica that has lost its cache."""
        self._blocks[replica] = Recent(BLOCKS)


def hash_blocks(tokens: Sequence[int], salt: Hashable = None) -> list[int]:
    """Return a hash for each full block of a prompt, for at most `HASHED` blocks.

    A block's hash covers `salt` and all tokens up to the end of the block.
    """
    ids = to_ids(tokens[: HASHED * BLOCK])
    blocks = (ids[end - BLOCK : end].tobytes() for end in range(BLOCK, len(ids) + 1, BLOCK))
    return list(accumulate(blocks, lambda number, block: hash((number, block)), initial=hash(salt)))[1:]
