"""The centroids of the replicas, which are mean signatures of their running and past requests."""

import numpy as np

from .table import Floats

PACE = 0.03
"""The weight that a new request gets in the mean of a replica's past requests."""
PRESENT = 0.8
"""The weight of a replica's running requests, which would be decoded together with the new request. Past requests have
the remaining weight, so requests of a domain return to the replica that has served this domain.
"""


class Centroids:
    """The signatures of each replica: one for its running requests, and a unit vector for its past requests."""

    def __init__(self, samples: Floats, replicas: int) -> None:
        self._past = cluster(samples, replicas)
        self._present = np.zeros_like(self._past)

    def compare(self, signature: Floats, loads: Floats) -> Floats:
        """Return a request's similarity to each replica, as [replicas]. A similarity is at most 1.

        `loads` [replicas] contains the number of running requests of each replica.
        """
        present = self._present @ signature / np.maximum(loads, 1)
        return PRESENT * present + (1 - PRESENT) * (self._past @ signature)

    def add(self, replica: int, signature: Floats) -> None:
        """Add a request to a replica."""
        self._present[replica] += signature
        moved = (1 - PACE) * self._past[replica] + PACE * signature
        self._past[replica] = moved / max(float(np.linalg.norm(moved)), 1e-6)

    def remove(self, replica: int, signature: Floats) -> None:
        """Remove an ended request from a replica."""
        self._present[replica] -= signature

    def clear(self, replica: int) -> None:
        """Reset the sum of an idle replica's signatures. This removes rounding errors."""
        self._present[replica] = 0


def cluster(samples: Floats, replicas: int, rounds: int = 10) -> Floats:
    """Return unit centroids [replicas, dimensions] of the samples, from spherical k-means.

    `samples` [samples, dimensions] contains unit vectors. They are repeated if there are fewer samples than replicas.
    The first centroid starts as the sample nearest to the mean. Each other centroid starts as the sample that is least
    similar to the centroids before it.
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
