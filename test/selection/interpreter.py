"""Triton's interpreter, in a process of its own: Triton chooses it once, at import."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import pytest


@contextmanager
def interpreted() -> Iterator[Callable[..., Any]]:
    """Call what it gives with a function of a module, and its arguments."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TRITON_INTERPRET", "1")
            environment.setenv("OMP_NUM_THREADS", "1")
            environment.setenv("PYTHONWARNINGS", "ignore")  # numpy's, of inf - inf and the like
            pool.submit(int).result()  # starts the process
        yield lambda function, *args, **keys: pool.submit(function, *args, **keys).result()
