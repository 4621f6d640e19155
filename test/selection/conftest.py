"""Fixtures: each backend, and where Triton runs."""

import pytest

from selection.compared import Backend, running
from selection.compiled import NEEDS_COMPILER


@pytest.fixture(scope="session")
def run():
    """Call a function where Triton runs."""
    with running() as call:
        yield call


@pytest.fixture(params=["torch", pytest.param("cpu", marks=NEEDS_COMPILER), "triton"])
def backend(request):
    """`select` by one backend; `HERE` as its parameters adds the reference and leaves out the kernel."""
    call = request.getfixturevalue("run") if request.param == "triton" else None
    return Backend(request.param, call)


@pytest.fixture
def kernel(run):
    """`select` by the Triton kernel."""
    return Backend("triton", run)
