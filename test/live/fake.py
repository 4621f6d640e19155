"""An HTTP server that answers as it is told, and keeps what it was asked."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer(ThreadingHTTPServer):
    """`answer` is for every route that `routes` does not have."""

    def __init__(self, answer: tuple[int, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.routes: dict[str, tuple[int, bytes]] = {}
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
        status, text = self.server.routes.get(self.path, self.server.answer)
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
