"""GET and POST /expert_policy, in the server's process.

Each route sends a control message of upstream's to every scheduler, which broadcasts the message to its ranks: all
ranks handle the message between the same two steps. GET takes the key of `/generate`, POST the key of routes that
administer the server.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from sglang.srt.utils.auth import AuthLevel, auth_level

from ..policies.keys import read_object
from . import PATH
from .replicas import Refusal, Replicas


def add_routes(app: FastAPI, find_manager: Callable[[], Any]) -> None:
    """Add both routes. `find_manager` returns upstream's TokenizerManager, which exists when a request arrives."""
    replicas = Replicas(find_manager)

    @app.get(PATH)
    @auth_level(AuthLevel.NORMAL)
    async def get_expert_policy() -> Response:
        return await _answer(replicas.get())

    @app.post(PATH)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def set_expert_policy(request: Request) -> Response:
        try:
            body = read_object(await request.body())
        except ValueError as error:
            return _refuse(str(error))
        return await _answer(replicas.switch(body))


async def _answer(question: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    try:
        # Shielded, because a cancelled handler would leave a switch half made and pending answers for the next request.
        return JSONResponse(await asyncio.shield(question))
    except Refusal as refusal:
        return _refuse(str(refusal), refusal.status)


def _refuse(reason: str, status: int = 400) -> Response:
    return JSONResponse({"error": reason}, status)
