"""Reports of ended requests to the controller of replicas, over a socket that only this user can reach.

SGLang's tokenizer process removes every ended request from a dictionary. `WatchedRequests` replaces that dictionary.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import zmq

from .socket_file import find_path, remove, remove_dead, sweep


class WatchedRequests(UserDict[str, Any]):
    """SGLang's states of requests by id; `tell` gets the id of each request that is removed after its dispatch."""

    def __init__(self, states: Mapping[str, Any], tell: Callable[[str], None]) -> None:
        self._tell = tell
        super().__init__(states)

    def __setitem__(self, request: str, state: Any) -> None:
        former = self.data.get(request, state)
        super().__setitem__(request, state)
        if former is not state:
            self._end(request, former)

    def __delitem__(self, request: str) -> None:
        state = self[request]
        super().__delitem__(request)
        self._end(request, state)

    def _end(self, request: str, state: Any) -> None:
        # The controller never gets a request that fails before `dispatched` is set; 0.5.18 and 0.5.19 lack this field.
        if getattr(state, "dispatched", True):
            self._tell(request)


def open_sender(instance: str) -> Callable[[str], None]:
    """Return a function that sends an ended request's id to this server's controller. Raises OSError."""
    path, socket = find_path(instance), _make_socket(zmq.PUSH)
    # -1: after multiprocessing has ended the children, because a killed controller, a child, leaves its socket.
    Finalize(None, remove_dead, (path,), exitpriority=-1)
    socket.connect(f"ipc://{path}")
    return lambda request: socket.send(request.encode(), zmq.NOBLOCK)


def open_receiver(instance: str) -> Callable[[], Iterator[str]]:
    """Return a function that yields the requests that ended since its last call, if any. Raises OSError."""
    path, socket = find_path(instance), _make_socket(zmq.PULL)
    sweep(path.parent.parent)
    Finalize(None, _close, (socket, path), exitpriority=-1)
    socket.bind(f"ipc://{path}")
    path.chmod(0o600)

    def receive() -> Iterator[str]:
        while socket.poll(0):
            yield socket.recv().decode()

    return receive


def _close(socket: zmq.Socket[bytes], path: Path) -> None:
    socket.close()
    remove(path)


def _make_socket(kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    # No limit: the controller reads only when a request arrives, and there is at most one message a request.
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket
