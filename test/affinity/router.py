"""A stand-in for SGLang's router: it numbers workers as that does, and tells who got what."""

from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


class Router:
    """Answers with the worker that the header numbers: of the healthy ones, in an order of its own."""

    def __init__(self) -> None:
        self.urls = ["http://c", "http://a", "http://b"]
        self.healthy = set(self.urls)
        self.got: list[tuple[str, str, Any]] = []
        self.asked: list[Request] = []
        self.breaks = False

    def make_app(self) -> Starlette:
        return Starlette(
            routes=[Route("/workers", self.list_workers), Route("/{path:path}", self.answer, methods=["GET", "POST"])]
        )

    async def list_workers(self, request: Request) -> JSONResponse:
        if self.breaks:
            return JSONResponse({"error": "starting"}, 503)
        return JSONResponse({"workers": [{"url": url, "is_healthy": url in self.healthy} for url in self.urls]})

    async def answer(self, request: Request) -> JSONResponse:
        self.asked.append(request)
        place = request.headers.get("x-smg-target-worker")
        url = "" if place is None else [url for url in self.urls if url in self.healthy][int(place)]
        self.got.append((request.url.path, url, await request.body()))
        if self.breaks:
            raise httpx.ReadError("the router broke the connection")
        return JSONResponse({"worker": url}, 200 if url or request.method == "GET" else 503)
