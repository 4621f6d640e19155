"""What each replica's experts are: signatures of what it runs, and of what it has been sent."""

import numpy as np

from .table import Floats

PACE = 0.03
"""How far a replica's past moves towards each request it gets."""
PRESENT = 0.8
"""Weight of what a replica runs now beside its past, which alone costs 0.8 experts of 46 (benchmark/README.md)."""


class Centroids:
    """Of every replica the mean signature of what it runs, and a unit vector that follows what it is sent."""

    def __init__(self, samples: Floats, replicas: int) -> None:
        self._past = cluster(samples, replicas)
        self._present = np.zeros_like(self._past)

    def compare(self, signature: Floats, loads: Floats) -> Floats:
        """Similarity of a request to each replica [replicas], at most 1: the dot product of its signature with the mean
        of what runs there and what was sent there. `loads` [replicas] are the requests that run.
        """
        present = self._present @ signature / np.maximum(loads, 1)
        return PRESENT * present + (1 - PRESENT) * (self._past @ signature)

    def add(self, replica: int, signature: Floats) -> None:
        """A replica gets a request."""
        self._present[replica] += signature
        moved = (1 - PACE) * self._past[replica] + PACE * signature
        self._past[replica] = moved / max(float(np.linalg.norm(moved)), 1e-6)

    def remove(self, replica: int, signature: Floats) -> None:
        """A replica is done with a request."""
        self._present[replica] -= signature

    def clear(self, replica: int) -> None:
        """A replica runs nothing; rounding errors of sums end here."""
        self._present[replica] = 0


def cluster(samples: Floats, replicas: int, rounds: int = 10) -> Floats:
    """Unit centroids [replicas, dimensions] of unit samples [samples, dimensions], by spherical k-means. Each starts as
    the sample least similar to those before it. Fewer samples than replicas are repeated.
    """
    samples = np.resize(samples, (max(len(samples), replicas), samples.shape[1])).astype(np.float32)
    chosen = [int(np.argmax(samples @ samples.mean(0)))]
    while len(chosen) < replicas:
        similarity = (samples @ samples[chosen].T).max(1)
        similarity[chosen] = np.inf
        chosen.append(int(np.argmin(similarity)))
    centroids = samples[chosen].copy()
    for _ in range(rounds):
        nearest = (samples @ centroids.T).argmax(1)
        for replica in range(replicas):
            total = samples[nearest == replica].sum(0)
            length = float(np.linalg.norm(total))
            if length > 1e-6:
                centroids[replica] = total / length
    return centroids
