"""Expert affinity in front of SGLang's router, as docs/affinity.md tells to start it.

The router's policies are compiled into it and take none from outside, but its `consistent_hashing` sends a request to
the worker that the header X-SMG-Target-Worker numbers. This server decides as `--load-balance-method expert_affinity`
does, sets that header, and hands the request on; a worker that the router calls unhealthy gets nothing.
"""

import argparse
import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sglang_xshare.affinity.dispatcher import Affinity
from sglang_xshare.affinity.table import load_table

HEADER = "X-SMG-Target-Worker"
LOOK = 2.0
"""Seconds between looks at the router's workers."""


class Proxy:
    """Decides and hands on. Workers keep their number here whatever order the router lists them in."""

    def __init__(
        self, client: httpx.AsyncClient, table: Path, tokenizer: PreTrainedTokenizerBase, bound: float
    ) -> None:
        self.client, self.tokenizer = client, tokenizer
        self.table, self.bound = load_table(table), bound
        self.affinity: Affinity | None = None
        self.urls: list[str] = []
        self.places: dict[int, int] = {}
        """The router's number of each healthy worker, by ours."""
        self._names = itertools.count()

    async def watch(self) -> None:
        """Look at the router's workers again and again."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK)

    async def look(self) -> None:
        """Learn which workers there are. Those that come later need a new start of this program."""
        workers = (await self.client.get("/workers")).json()["workers"]
        if self.affinity is None:
            self.urls = sorted(worker["url"] for worker in workers)
            self.affinity = Affinity(self.table, len(self.urls), self.bound)
        self.places = {
            self.urls.index(worker["url"]): place
            for place, worker in enumerate(workers)
            if worker["is_healthy"] and worker["url"] in self.urls
        }
        self.affinity.set_alive(list(self.places))

    async def send(self, request: Request) -> Response:
        """Hand one request on, to the worker that suits it."""
        body, name = await request.body(), next(self._names)
        headers = {"content-type": "application/json"}
        if request.method == "POST" and self.affinity is not None and self.places:
            chosen = self.affinity.choose(name, self.tokenize(orjson.loads(body))).replica
            headers[HEADER] = str(self.places[chosen])
        path = request.url.path
        answer = await self.client.send(
            self.client.build_request(request.method, path, content=body, headers=headers), stream=True
        )
        kind = answer.headers.get("content-type")
        return StreamingResponse(self.read(name, answer), answer.status_code, media_type=kind)

    async def read(self, name: int, answer: httpx.Response) -> AsyncIterator[bytes]:
        """Pieces of an answer. The request has ended with the last one, or where its client leaves."""
        try:
            async for piece in answer.aiter_bytes():
                yield piece
        finally:
            if self.affinity is not None:
                self.affinity.finish(name)
            await answer.aclose()

    def tokenize(self, body: dict[str, Any]) -> Sequence[int]:
        """The prompt's token ids; of several prompts the first's."""
        if "messages" in body:
            return list(self.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True))
        prompt: Any = next((body[key] for key in ("input_ids", "text", "prompt") if body.get(key)), [])
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]
        return self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt


def make_app(proxy: Proxy) -> Starlette:
    """The server."""
    return Starlette(routes=[Route("/{path:path}", proxy.send, methods=["GET", "POST"])])


async def serve(arguments: argparse.Namespace) -> None:
    """Until it is stopped."""
    async with httpx.AsyncClient(base_url=arguments.router, timeout=None) as client:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        proxy = Proxy(client, arguments.table, tokenizer, arguments.bound)
        await proxy.look()
        watching = asyncio.create_task(proxy.watch())
        await uvicorn.Server(uvicorn.Config(make_app(proxy), port=arguments.port)).serve()
        watching.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", required=True, metavar="URL", help="of SGLang's router")
    parser.add_argument("--table", type=Path, required=True, metavar="FILE", help="of `sglang-xshare calibrate`")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="whose tokenizer to use")
    parser.add_argument("--bound", type=float, default=1.1, help="most requests of a worker over the mean (1.1)")
    parser.add_argument("--port", type=int, default=30000, help="where it listens (30000)")
    asyncio.run(serve(parser.parse_args()))
