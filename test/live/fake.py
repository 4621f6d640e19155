"""An HTTP server that answers as it is told, and keeps what it was asked."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COUNTS = {"layer_steps": 8, "experts_before": 116, "experts_after": 50, "kept_mass": 7.0, "rows": 8, "rescued": 0} | {
    "outcomes": {"policy": 2}
}
ANSWER: dict[str, Any] = {
    **{"policy": "xshare", "k0": 1, "plan_hash": "0a1b2c3d", "since_switch": COUNTS, "switches": 3},
    "in_force": {"policy": "xshare", "k0": 1, "add": 24, "phases": ["decode"], "overrides": []},
    "limits": {"batches": "at most 16", "captured_rows": [], "selecting_rows": []},
}
"""A server's answer to GET."""


class FakeServer(ThreadingHTTPServer):
    """`answer` is for every route that `routes` does not have; a body that is no bytes is sent as JSON."""

    def __init__(self, answer: tuple[int, Any]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.routes: dict[str, tuple[int, Any]] = {}
        self.location = ""
        """Header `Location` of the answers, which have none unless it is set."""
        self.name = "uvicorn"
        """Header `Server` of the answers; SGLang's unless it is changed."""
        self.headers: list[dict[str, str]] = []
        """Of every request, by their names in lower case."""
        self.asked: list[tuple[str, str, str | None, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self.reply(None)

    def do_POST(self) -> None:
        self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def reply(self, body: Any) -> None:
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        self.server.asked.append((self.command, self.path, self.headers.get("Authorization"), body))
        status, answer = self.server.routes.get(self.path, self.server.answer)
        text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.end_headers()
        self.wfile.write(text)

    def version_string(self) -> str:
        return self.server.name

    def log_message(self, *args: Any) -> None:
        pass
