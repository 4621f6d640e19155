"""The routes GET and POST /expert_policy, in the server's process.

Each route sends one of SGLang's control messages to every scheduler. A scheduler broadcasts the message to its ranks.
All of these ranks handle the message between the same two steps. GET needs the same key as `/generate`. POST needs the
same key as the routes that administer the server.
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
    """Add both routes. `find_manager` returns SGLang's TokenizerManager, and is called for each request."""
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
        # Without the shield, a cancelled handler would leave a switch half made, and the next request would receive the
        # pending answers.
        return JSONResponse(await asyncio.shield(question))
    except Refusal as refusal:
        return _refuse(str(refusal), refusal.status)


def _refuse(reason: str, status: int = 400) -> Response:
    return JSONResponse({"error": reason}, status)
