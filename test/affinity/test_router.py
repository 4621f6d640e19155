"""The example in front of SGLang's router: a stand-in router that numbers workers as it does tells who got what.

python examples/affinity_router.py --router http://localhost:30001 --table FILE --model DIR
"""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from affinity.tables import make_table, prompt
from benchmark.common.paths import ROOT


class Tokenizer:
    """Ids written as words."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> list[int]:
        return self(messages[-1]["content"])["input_ids"]


class Router:
    """Answers with the worker that the header numbers, in an order of its own."""

    def __init__(self) -> None:
        self.urls = ["http://c", "http://a", "http://b"]
        self.healthy = set(self.urls)
        self.got: list[tuple[str, str, Any]] = []

    def make_app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/workers", self.list_workers),
                Route("/{path:path}", self.answer, methods=["GET", "POST"]),
            ]
        )

    async def list_workers(self, request: Request) -> JSONResponse:
        return JSONResponse({"workers": [{"url": url, "is_healthy": url in self.healthy} for url in self.urls]})

    async def answer(self, request: Request) -> JSONResponse:
        place = request.headers.get("x-smg-target-worker")
        url = "" if place is None else self.urls[int(place)]
        self.got.append((request.url.path, url, await request.json() if request.method == "POST" else None))
        return JSONResponse({"worker": url}, 200 if url or request.method == "GET" else 503)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("affinity_router", ROOT / "examples" / "affinity_router.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def table(tmp_path: Path) -> Path:
    make_table().save(tmp_path / "table")
    return tmp_path / "table"


def test_requests_go_to_the_worker_that_suits_them_whatever_its_number(example: ModuleType, table: Path) -> None:
    router = Router()

    async def play() -> None:
        inner = httpx.AsyncClient(transport=httpx.ASGITransport(router.make_app()), base_url="http://router")
        proxy = example.Proxy(inner, table, Tokenizer(), 3.0)
        await proxy.look()
        outer = httpx.AsyncClient(transport=httpx.ASGITransport(example.make_app(proxy)), base_url="http://proxy")
        for number in range(3):  # long ones that still run: the topics of the three
            proxy.affinity.choose(f"running {number}", prompt(number))
        homes = [proxy.affinity._running[f"running {number}"].replica for number in range(3)]
        assert sorted(homes) == [0, 1, 2]
        wanted = [proxy.urls[home] for home in homes]

        async def ask(path: str, body: dict[str, Any]) -> str:
            return (await outer.post(path, json=body)).json()["worker"]

        text = " ".join(map(str, prompt(1, start=3)))
        assert await ask("/generate", {"input_ids": prompt(0, start=3)}) == wanted[0]
        assert await ask("/generate", {"text": text}) == wanted[1]
        assert await ask("/v1/completions", {"prompt": [text]}) == wanted[1]
        assert await ask("/v1/chat/completions", {"messages": [{"content": text}]}) == wanted[1]
        router.urls.reverse()
        await proxy.look()
        assert await ask("/generate", {"input_ids": prompt(0, start=5)}) == wanted[0]
        router.healthy.discard(wanted[0])
        await proxy.look()
        assert await ask("/generate", {"input_ids": prompt(0, start=7)}) in wanted[1:]
        assert (await outer.get("/health")).status_code == 200
        assert sum(proxy.affinity.loads) == 2  # the answered ones have ended, and the dead worker's is gone

    asyncio.run(play())
    assert router.got[-1] == ("/health", "", None)
    assert router.got[0][2] == {"input_ids": prompt(0, start=3)}
