"""A trigram model over token ids. A trained checkpoint must have a lower loss than this model.

The model uses the smoothing of Kneser and Ney (1995), interpolated as in Chen and Goodman (1998). Each order has one
discount, which is tuned on separate text.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]
DISCOUNTS = (0.05, 0.15, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98)


class Trigram:
    """A model of P(token | two previous tokens).

    The trigram probability is interpolated with the bigram and unigram continuation counts and a uniform distribution.
    """

    def __init__(self, ids: Ids, vocab_size: int, discounts: tuple[float, float, float] = (0.75, 0.75, 0.75)) -> None:
        """Count the n-grams in `ids` [tokens]. The discounts are for trigrams, bigrams and unigrams, in this order."""
        self.vocab_size, self.discounts = vocab_size, discounts
        trigrams, self.trigram_counts = np.unique(self._keys(ids, 3), return_counts=True)
        bigrams, self.bigram_counts = np.unique(trigrams % vocab_size**2, return_counts=True)
        self.unigram_counts = np.bincount(bigrams % vocab_size, minlength=vocab_size)
        self.trigrams, self.bigrams = trigrams, bigrams

    @classmethod
    def tuned(cls, ids: Ids, dev: Ids, vocab_size: int) -> Trigram:
        """Count the n-grams in `ids`, and choose the discounts with the lowest cross-entropy on the text `dev`."""
        model = cls(ids, vocab_size)

        def loss(discounts: tuple[float, float, float]) -> float:
            model.discounts = discounts
            return float(model.losses(dev).mean())

        model.discounts = min(product(DISCOUNTS, DISCOUNTS, (0.5, 0.75, 0.9)), key=loss)
        return model

    def losses(self, ids: Ids) -> Floats:
        """Return the loss, -log P in nats, of all tokens except the first two, as [tokens - 2]."""
        size = self.vocab_size
        token = ids[2:]
        probability = self._discounted(
            self.unigram_counts[token], self.unigram_counts.sum(), np.count_nonzero(self.unigram_counts), 2, 1 / size
        )
        for order, keys, counts, seen in (
            (2, self.bigrams, self.bigram_counts, 1),
            (3, self.trigrams, self.trigram_counts, 0),
        ):
            grams = self._keys(ids, order)[3 - order :]
            total, kinds = self._history(keys, counts, grams // size)
            probability = self._discounted(_lookup(keys, counts, grams), total, kinds, seen, probability)
        return -np.log(probability)

    def _discounted(
        self, count: Ids, total: Ids | np.integer, kinds: Ids | np.integer | int, order: int, backoff: Floats | float
    ) -> Floats:
        discount = self.discounts[order]
        known = np.maximum(total, 1)
        own = np.maximum(count - discount, 0) / known
        return np.where(np.asarray(total) > 0, own + discount * kinds / known * backoff, backoff)

    def _history(self, keys: Ids, counts: Ids, histories: Ids) -> tuple[Ids, Ids]:
        """Return the number of occurrences of each history, and the number of different tokens after it.

        `keys` is sorted, so all n-grams with the same history form a range.
        """
        first = np.searchsorted(keys, histories * self.vocab_size)
        last = np.searchsorted(keys, (histories + 1) * self.vocab_size)
        sums = np.concatenate([[0], np.cumsum(counts)])
        return sums[last] - sums[first], last - first

    def _keys(self, ids: Ids, order: int) -> Ids:
        """Return one integer for each n-gram, as [tokens - order + 1]. The token ids are its digits."""
        length = len(ids) - order + 1
        keys = np.zeros(length, np.int64)
        for offset in range(order):
            keys = keys * self.vocab_size + ids[offset : offset + length]
        return keys


def _lookup(keys: Ids, counts: Ids, wanted: Ids) -> Ids:
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, counts[at], 0)
