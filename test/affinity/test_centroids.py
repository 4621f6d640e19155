"""The similarity of a request to a replica, by hand: of what runs there, and of all that was sent there."""

import numpy as np
import pytest

from sglang_xshare.affinity.centroids import PACE, PRESENT, Centroids


def test_similarity_is_that_of_what_runs_beside_a_unit_vector_of_what_was_sent() -> None:
    centroids = Centroids(np.eye(2, dtype=np.float32), 2)
    signature, past = np.array([0, 1], dtype=np.float32), np.array([1.0, 0.0])

    def compare(running: int) -> list[float]:
        return centroids.compare(signature, np.array([running, 0], dtype=np.float32)).tolist()

    for running in (1, 2, 3):
        centroids.add(0, signature)
        past = (1 - PACE) * past + PACE * signature
        past /= np.linalg.norm(past)
        assert compare(running) == pytest.approx([PRESENT + (1 - PRESENT) * past[1], 1 - PRESENT])
    centroids.remove(0, signature)
    assert compare(2) == pytest.approx([PRESENT + (1 - PRESENT) * past[1], 1 - PRESENT])
    centroids.clear(0)
    assert compare(0) == pytest.approx([(1 - PRESENT) * past[1], 1 - PRESENT])
