"""The example in front of SGLang's router: a stand-in router that numbers workers as it does tells who got what.

python examples/affinity_router.py --router http://localhost:30001 --table FILE --model DIR
"""

import argparse
import asyncio
import importlib.util
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import AutoTokenizer

from affinity.tables import make_table, prompt
from benchmark.common.paths import ROOT, TRAINED
from sglang_xshare.affinity.table import load_table

pytestmark = pytest.mark.anyio


class Router:
    """Answers with the worker that the header numbers: of the healthy ones, in an order of its own."""

    def __init__(self) -> None:
        self.urls = ["http://c", "http://a", "http://b"]
        self.healthy = set(self.urls)
        self.got: list[tuple[str, str, Any]] = []
        self.asked: list[Request] = []
        self.breaks = False

    def make_app(self) -> Starlette:
        routes = [Route("/workers", self.list_workers), Route("/{path:path}", self.answer, methods=["GET", "POST"])]
        return Starlette(routes=routes)

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


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("affinity_router", ROOT / "examples" / "affinity_router.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def table(tmp_path):
    make_table().save(tmp_path / "table")
    return tmp_path / "table"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TRAINED)


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def router():
    return Router()


@pytest.fixture
async def proxy(example, table, tokenizer, router):
    """The example's proxy in front of the router."""
    inner = httpx.ASGITransport(router.make_app())
    async with httpx.AsyncClient(transport=inner, base_url="http://router") as client:
        proxy = example.Proxy(client, load_table(table), tokenizer, 3.0)
        await proxy.look()
        yield proxy


@pytest.fixture
async def client(example, proxy):
    app = httpx.ASGITransport(example.make_app(proxy), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=app, base_url="http://proxy") as client:
        yield client


async def test_requests_go_to_the_worker_that_suits_them_whatever_its_number(router, proxy, client, tokenizer):
    for number in range(3):  # long ones that still run: the topics of the three
        proxy.affinity.choose(f"running {number}", prompt(number))
    homes = [proxy.affinity._running[f"running {number}"][0] for number in range(3)]
    assert sorted(homes) == [0, 1, 2]
    wanted = [proxy.urls[home] for home in homes]

    async def ask(path: str, body: dict[str, Any]) -> str:
        return (await client.post(path, json=body)).json()["worker"]

    text = tokenizer.decode(prompt(1, start=3))
    said = [{"role": "user", "content": text}]
    assert await ask("/generate", {"input_ids": prompt(0, start=3)}) == wanted[0]
    assert orjson.loads(router.got[0][2]) == {"input_ids": prompt(0, start=3)}
    assert await ask("/generate", {"text": text}) == wanted[1]
    assert await ask("/v1/completions", {"prompt": [text]}) == wanted[1]
    assert await ask("/v1/chat/completions", {"messages": said}) == wanted[1]
    router.urls.reverse()
    await proxy.look()
    assert await ask("/generate", {"input_ids": prompt(0, start=5)}) == wanted[0]
    router.healthy.discard(wanted[0])
    await proxy.look()
    assert await ask("/generate", {"input_ids": prompt(0, start=7)}) in wanted[1:]
    assert (await client.get("/health")).status_code == 200
    assert router.got[-1] == ("/health", "", b"")
    assert sum(proxy.affinity.loads) == 2  # the answered ones have ended, and the dead worker's is gone


async def test_a_dead_worker_misleads_no_request(router, proxy, client):
    for dead in list(router.urls):
        router.healthy = set(router.urls) - {dead}
        await proxy.look()
        assert {proxy.urls[replica] for replica in proxy.places} == router.healthy
        for replica in proxy.places:
            proxy.affinity.set_alive([replica])
            answer = await client.post("/generate", json={"input_ids": prompt(0)})
            assert answer.json()["worker"] == proxy.urls[replica]


async def test_what_a_client_sends_reaches_the_worker(router, proxy, client):
    parts = orjson.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]})
    headers = {"Authorization": "Bearer key", "X-SMG-Target-Worker": "9"}
    for body in (b"", b"no JSON", b"[1]", b'"text"', b'{"prompt": [1, {}]}', parts):
        answer = await client.post("/generate?a=1&b=2", content=body, headers=headers)
        last = router.asked[-1]
        assert (answer.status_code, router.got[-1][2]) == (200, body)
        assert (last.headers["authorization"], last.headers["host"]) == ("Bearer key", "router")
        assert last.url.query == "a=1&b=2"
    assert sum(proxy.affinity.loads) == 0


async def test_a_request_ends_where_the_router_or_its_client_leaves(example, router, proxy, client):
    router.breaks = True
    assert (await client.post("/generate", json={"input_ids": [1]})).status_code == 500
    assert sum(proxy.affinity.loads) == 0
    router.breaks = False

    async def send(message: Any) -> None:
        raise OSError("the client has left")

    scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b"", "headers": []}
    for version in ("2.3", "2.4"):  # of ASGI: the client's leaving is a message, or an error
        bodies = [b'{"input_ids": [1]}']
        before = len(router.got)

        async def receive(bodies: list[bytes] = bodies, before: int = before) -> Any:
            if bodies:
                return {"type": "http.request", "body": bodies.pop()}
            while len(router.got) == before:
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        with suppress(ClientDisconnect, OSError):
            await example.make_app(proxy)({**scope, "asgi": {"spec_version": version}}, receive, send)
        assert sum(proxy.affinity.loads) == 0
    assert len(router.got) == 3


WRONG = [("table", Path("nosuch")), ("model", Path("nosuch")), ("bound", 0.5), ("bound", float("nan"))]


@pytest.mark.parametrize(("flag", "value"), [*WRONG, ("router", "http://127.0.0.1:9"), ("router", "127.0.0.1")])
async def test_a_wrong_flag_is_one_line(example, table, flag, value):
    right = {"router": "http://127.0.0.1:9", "table": table, "model": TRAINED, "bound": 1.1, "port": 0}
    with pytest.raises(SystemExit) as left:
        await example.serve(argparse.Namespace(**{**right, flag: value}))
    assert str(left.value).startswith(f"affinity_router: --{flag} {value}: ")
    assert "\n" not in str(left.value)
