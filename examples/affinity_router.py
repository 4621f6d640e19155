"""Expert affinity in front of SGLang's router; examples/README.md describes how to start both.

The router accepts no policy from outside, but its `consistent_hashing` sends a request to the worker that the header
X-SMG-Target-Worker numbers. This server decides as `--load-balance-method expert_affinity` does, sets that header, and
forwards the request. A worker that the router calls unhealthy gets nothing.
"""

import argparse
import asyncio
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sglang_xshare.affinity.decision import DEFAULT, Affinity
from sglang_xshare.affinity.table import Table, hash_tokenizer, load_table

HEADER = "X-SMG-Target-Worker"
OWN = ("host", "content-length", "transfer-encoding", "connection", "accept-encoding", HEADER.lower())
"""Headers that belong to one connection; all others are forwarded."""
LOOK = 2.0
"""Seconds between two requests for the router's workers."""


class Proxy:
    """A proxy that chooses a worker. A worker keeps its number here, in whatever order the router lists the workers."""

    def __init__(
        self, client: httpx.AsyncClient, table: Table, tokenizer: PreTrainedTokenizerBase, bound: float
    ) -> None:
        self.client, self.table, self.tokenizer, self.bound = client, table, tokenizer, bound
        self.affinity: Affinity | None = None
        self.urls: list[str] = []
        self.places: dict[int, int] = {}
        """The router's number of each healthy worker, by our number: the router counts healthy workers only."""
        self._names = itertools.count()

    async def watch(self) -> None:
        """Update the router's workers repeatedly, also after a request that failed."""
        while True:
            try:
                await self.look()
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                print(f"affinity_router: workers unchanged, GET /workers failed: {error!r}", flush=True)
            await asyncio.sleep(LOOK)

    async def look(self) -> None:
        """Read the router's workers. A worker that is added later needs a restart of this program."""
        workers = (await self.client.get("/workers")).json()["workers"]
        if self.affinity is None:
            self.urls = sorted(worker["url"] for worker in workers)
            self.affinity = Affinity(self.table, len(self.urls), self.bound)
        healthy = [worker["url"] for worker in workers if worker["is_healthy"]]
        self.places = {self.urls.index(url): place for place, url in enumerate(healthy) if url in self.urls}
        self.affinity.set_alive(list(self.places))

    async def send(self, request: Request) -> Response:
        """Forward one request to the worker that suits it."""
        name = next(self._names)
        headers = [(key, value) for key, value in request.headers.items() if key not in OWN]
        try:
            body = await request.body()
            if request.method == "POST" and self.affinity is not None and self.places:
                chosen = self.affinity.choose(name, self.tokenize(body)).replica
                headers.append((HEADER, str(self.places[chosen])))
            path, params = request.url.path, request.query_params.multi_items()
            asked = self.client.build_request(request.method, path, params=params, content=body, headers=headers)
            return Relay(self, name, await self.ask(asked, request))
        except ClientDisconnect:
            self.finish(name)
            return Response(status_code=499)  # the client has left
        except BaseException:  # a router that is down
            self.finish(name)
            raise

    async def ask(self, asked: httpx.Request, request: Request) -> httpx.Response:
        """Return the router's answer once it begins.

        Raises ClientDisconnect if the client leaves first; the request to the router is then cancelled.
        """
        answer = asyncio.ensure_future(self.client.send(asked, stream=True))
        left = asyncio.ensure_future(leave(request))
        try:
            await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ClientDisconnect
            return answer.result()
        finally:
            answer.cancel()
            left.cancel()

    def finish(self, name: int) -> None:
        """Count the end of a request."""
        if self.affinity is not None:
            self.affinity.finish(name)

    def tokenize(self, body: bytes) -> Sequence[int]:
        """Return the token ids of the first prompt; none without a prompt, or if it cannot be tokenized."""
        try:
            asked = orjson.loads(body)
            if not isinstance(asked, dict):
                return []
            if "messages" in asked:
                render = self.tokenizer.apply_chat_template
                return render(asked["messages"], add_generation_prompt=True, return_dict=False)
            prompt: Any = next((asked[key] for key in ("input_ids", "text", "prompt") if asked.get(key)), [])
            if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
                prompt = prompt[0]
            return self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else [int(one) for one in prompt]
        except Exception as error:  # a chat template may raise anything; the worker reports what is wrong
            print(f"affinity_router: a prompt could not be tokenized: {error!r}", flush=True)
            return []


class Relay(StreamingResponse):
    """An answer on its way to the client. Its request ends with the last piece, or when the client leaves."""

    def __init__(self, proxy: Proxy, name: int, answer: httpx.Response) -> None:
        super().__init__(answer.aiter_bytes(), answer.status_code, media_type=answer.headers.get("content-type"))
        self.proxy, self.name, self.answer = proxy, name, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream the answer, then count the end of its request."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.proxy.finish(self.name)
            await self.answer.aclose()


async def leave(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def make_app(proxy: Proxy) -> Starlette:
    """Return the application."""
    return Starlette(routes=[Route("/{path:path}", proxy.send, methods=["GET", "POST"])])


@contextmanager
def blame(flag: str, value: object, allowed: str) -> Iterator[None]:
    """Report a failure inside as one line about this flag, with exit code 1."""
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"affinity_router: {flag} {value}: {' '.join(str(error).split())}; must be {allowed}")


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until the program is stopped."""
    if not (math.isfinite(arguments.bound) and arguments.bound >= 1):
        sys.exit(f"affinity_router: --bound {arguments.bound}: must be a number of at least 1")
    with blame("--table", arguments.table, "a file of `sglang-xshare calibrate`"):
        table = load_table(arguments.table)
    with blame("--model", arguments.model, "the folder of a checkpoint with its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
        if table.origin["tokenizer"] not in ("", hash_tokenizer(arguments.model)):
            raise ValueError("its tokenizer must be the table's")
    with blame("--router", arguments.router, "the URL of SGLang's router, running, with workers"):
        client = httpx.AsyncClient(base_url=arguments.router, timeout=None, limits=httpx.Limits(max_connections=None))
        proxy = Proxy(client, table, tokenizer, arguments.bound)
        await proxy.look()
    watching = asyncio.create_task(proxy.watch())
    await uvicorn.Server(uvicorn.Config(make_app(proxy), arguments.host, arguments.port)).serve()
    watching.cancel()
    await client.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", required=True, metavar="URL", help="of SGLang's router")
    parser.add_argument("--table", type=Path, required=True, metavar="FILE", help="of `sglang-xshare calibrate`")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="whose tokenizer to use")
    parser.add_argument("--bound", type=float, default=DEFAULT, help="most of a worker over the mean (%(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="where it listens (%(default)s)")
    parser.add_argument("--port", type=int, default=30000, help="where it listens (%(default)s)")
    asyncio.run(serve(parser.parse_args()))
