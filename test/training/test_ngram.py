"""The trigram model against its formula written out with dictionaries."""

from collections import Counter, defaultdict
from math import log

import numpy as np
import pytest
from numpy.random import default_rng

from training.ngram import Trigram

VOCAB = 7
DISCOUNTS = (0.6, 0.8, 0.5)


class Brute:
    """Interpolated Kneser-Ney by its definition."""

    def __init__(self, ids: list[int]) -> None:
        self.trigrams = Counter(zip(ids, ids[1:], ids[2:], strict=False))
        self.before: dict[tuple[int, int], set[int]] = defaultdict(set)
        for first, second, third in self.trigrams:
            self.before[second, third].add(first)

    def probability(self, first: int, second: int, third: int) -> float:
        counts = {token: self.trigrams[first, second, token] for token in range(VOCAB)}
        return self._mix(counts, third, DISCOUNTS[0], self._bigram(second, third))

    def _bigram(self, second: int, third: int) -> float:
        counts = {token: len(self.before.get((second, token), ())) for token in range(VOCAB)}
        return self._mix(counts, third, DISCOUNTS[1], self._unigram(third))

    def _unigram(self, third: int) -> float:
        counts = {token: sum((before, token) in self.before for before in range(VOCAB)) for token in range(VOCAB)}
        return self._mix(counts, third, DISCOUNTS[2], 1 / VOCAB)

    @staticmethod
    def _mix(counts: dict[int, int], token: int, discount: float, lower: float) -> float:
        total, kinds = sum(counts.values()), sum(count > 0 for count in counts.values())
        if not total:
            return lower
        return max(counts[token] - discount, 0) / total + discount * kinds / total * lower


@pytest.mark.parametrize("length", [3, 20, 400])
def test_losses_follow_the_formula(length: int) -> None:
    rng = default_rng(length)
    ids, unseen = rng.integers(0, VOCAB - 1, length), rng.integers(0, VOCAB, 50)
    brute = Brute(ids.tolist())
    wanted = [-log(brute.probability(*unseen[place : place + 3])) for place in range(48)]
    np.testing.assert_allclose(Trigram(ids, VOCAB, DISCOUNTS).losses(unseen), wanted)
