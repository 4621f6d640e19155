"""Servers on the GPU that is not there. Their tests run in an environment of their own: `make test-cuda`."""

import os

import pytest

from fake_gpu.server import Server, start_server

# Set by environment.sh, which `make test-cuda` reads; every other run of pytest passes this folder by.
collect_ignore_glob = [] if os.environ.get("FAKE_GPU_LOG") else ["test_*.py"]


@pytest.fixture
def serve(tmp_path):
    """A function (model, *flags, **environment) that starts a server; all are stopped in the end."""
    servers: list[Server] = []

    def serve(model, *flags, **environment):
        servers.append(start_server(model, tmp_path / str(len(servers)), flags, environment))
        return servers[-1]

    yield serve
    for server in servers:
        server.stop()
