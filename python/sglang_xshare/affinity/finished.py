"""Reports of ended requests, sent to the data-parallel controller over SGLang's socket for requests.

SGLang's tokenizer process removes every ended request from a dictionary. `WatchedRequests` replaces that dictionary.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

from . import METHOD


class WatchedRequests(UserDict[str, Any]):
    """SGLang's request states by request id. `report` is called with the id of each removed or replaced request."""

    def __init__(self, states: Mapping[str, Any], report: Callable[[str], None]) -> None:
        self._report = report
        super().__init__(states)

    def __setitem__(self, request: str, state: Any) -> None:
        former = self.data.get(request, state)
        super().__setitem__(request, state)
        if former is not state:
            self._report(request)

    def __delitem__(self, request: str) -> None:
        super().__delitem__(request)
        self._report(request)

    def __ior__(self, states: Any) -> WatchedRequests:  # type: ignore[override, misc]
        self.update(states)  # UserDict's own method bypasses __setitem__
        return self


def report_end(manager: Any, request: str) -> None:
    """Send the id of an ended request from a tokenizer manager to the controller.

    The message arrives after the request, because both use the same socket. `Dispatcher.receive` handles the message,
    and ignores the id of an unknown request.
    """
    from sglang.srt.managers.io_struct import RpcReqInput

    manager._dispatch_to_scheduler(RpcReqInput(method=METHOD, rid=request))
