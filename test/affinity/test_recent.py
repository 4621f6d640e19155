"""What is remembered of prompts and conversations, and for how long."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from sglang_xshare.affinity.recent import BLOCK, Prefixes, Recent, hash_blocks


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 5))
def test_the_latest_keys_are_kept(keys: list[int], most: int) -> None:
    recent = Recent(most)
    for place, key in enumerate(keys):
        recent.put(key, place)
    latest = list(dict.fromkeys(reversed(keys)))[:most]
    for key in range(10):
        expected = max(place for place, one in enumerate(keys) if one == key) if key in latest else None
        assert recent.get(key) == expected


@given(st.integers(0, 200), st.integers(0, 200))
def test_the_common_beginning_is_found_by_whole_blocks(length: int, common: int) -> None:
    common = min(length, common)
    first = list(range(length))
    second = [*first[:common], *(-1 - token for token in first[common:])]
    prefixes = Prefixes(2)
    prefixes.add(0, hash_blocks(first))
    blocks = length // BLOCK
    expected = (common // BLOCK) / blocks if blocks else 0.0
    assert prefixes.match(0, hash_blocks(second)) == expected
    assert prefixes.match(1, hash_blocks(second)) == 0
    prefixes.clear(0)
    assert prefixes.match(0, hash_blocks(second)) == 0


def test_however_tokens_are_kept_their_blocks_are_the_same() -> None:
    tokens = [1, 2**40, -1, 7] * 20
    assert hash_blocks(tokens) == hash_blocks(array("q", tokens))
    assert len(hash_blocks([2**64 - 1, *tokens])) == 2


def test_a_salt_tells_prompts_apart() -> None:
    tokens = list(range(100))
    assert not set(hash_blocks(tokens, "one")) & set(hash_blocks(tokens, "two"))
