"""The HTTP routes: guarded by upstream's own keys, one answer of all schedulers, one line for what is refused."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import add_api_key_middleware

from live.fake import ANSWER as TOLD
from live.fake import COUNTS
from sglang_xshare.live import METHOD, PATH
from sglang_xshare.live.replicas import merge
from sglang_xshare.live.routes import add_routes

ANSWER = TOLD | {"counters": COUNTS, "counted_ago": 0.0, "switches": 0, "own_switches": 0, "disagreement": None}
UNCOUNTED = {"counters": None, "since_switch": None, "counted_ago": None, "own_switches": None}
"""In the answer of a rank whose steps the first rank has counted."""
POST = {"policy": "oea", "k0": 3}


class Manager:
    """Upstream's TokenizerManager, as far as it hands control messages to schedulers."""

    def __init__(self, *outputs: SimpleNamespace) -> None:
        self.outputs = outputs
        self.asked: list[Any] = []

    async def dumper_control(self, request: Any) -> list[SimpleNamespace]:
        await asyncio.sleep(0)
        self.asked.append((request.method, request.body))
        return list(self.outputs)


def said(answer: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(success=True, response=[answer], error="")


def refused(line: str) -> SimpleNamespace:
    return SimpleNamespace(success=False, response=[], error=line)


def make_client(manager: Manager, api_key: str | None = None, admin_api_key: str | None = None) -> TestClient:
    app = FastAPI()
    add_routes(app, lambda: manager)
    add_api_key_middleware(app, api_key=api_key, admin_api_key=admin_api_key)
    return TestClient(app)


def test_the_schedulers_are_asked_by_one_message_for_a_get_and_two_for_a_post():
    manager = Manager(said(ANSWER))
    client = make_client(manager)
    answer = client.get(PATH).json()
    assert answer["k0"] == 1
    assert "own_switches" not in answer
    for _ in range(2):
        assert client.post(PATH, json=POST).json()["policy"] == "xshare"
    assert {method for method, _ in manager.asked} == {METHOD}
    get, check, commit, other, _ = [body for _, body in manager.asked]
    epoch = check["epoch"]
    assert (get, check, commit) == ({}, {"check": POST, "epoch": epoch}, {"commit": epoch, "number": 1})
    assert other["epoch"] != epoch


def test_a_post_that_is_cancelled_is_made_to_its_end():
    """As a server does that ends: a half made switch would leave two policies."""
    manager, app = Manager(said(ANSWER)), FastAPI()
    add_routes(app, lambda: manager)
    (post,) = [route.endpoint for route in app.routes if "POST" in getattr(route, "methods", ())]

    async def cancel() -> None:
        task = asyncio.create_task(post(SimpleNamespace(body=AsyncMock(return_value=b'{"policy": "oea", "k0": 3}'))))
        while not manager.asked:
            await asyncio.sleep(0)
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert task.cancelled()

    asyncio.run(cancel())
    assert [next(iter(body)) for _, body in manager.asked] == ["check", "commit"]


def test_counts_of_replicas_are_added_up_and_of_ranks_taken_once():
    replicas = merge([ANSWER, ANSWER])["counters"]
    assert (replicas["layer_steps"], replicas["outcomes"]) == (16, {"policy": 4})
    assert (replicas["mean_before"], replicas["mean_after"], replicas["mean_kept_mass"]) == (14.5, 6.25, 7 / 8)
    ranks = merge([ANSWER, ANSWER | UNCOUNTED])
    assert ranks["counters"]["layer_steps"] == ranks["since_switch"]["layer_steps"] == 8


def test_merged_counters_are_as_old_as_the_oldest():
    answers = [ANSWER | {"counted_ago": 0.25}, ANSWER | {"counted_ago": 0.75}, ANSWER | UNCOUNTED]
    assert merge(answers)["counted_ago"] == 0.75
    assert merge([ANSWER, ANSWER | UNCOUNTED])["counted_ago"] == 0


def test_counts_by_layer_are_added_up_layer_by_layer():
    layers = [{"layer": 1, "layer_steps": 2, "kept_mass": 1.5}, {"layer": 3, "layer_steps": 2, "kept_mass": 0.5}]
    told = ANSWER | {"counters": COUNTS | {"by_layer": layers}}
    merged = merge([told, told, told | UNCOUNTED])
    assert merged["counters"]["by_layer"] == [
        {"layer": 1, "layer_steps": 4, "kept_mass": 3.0},
        {"layer": 3, "layer_steps": 4, "kept_mass": 1.0},
    ]
    assert "by_layer" not in merged["since_switch"]


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (b'{"policy"', "JSON must be one object (malformed: "),
        (b"", "JSON must be one object (malformed: "),
        (b"null", "JSON must be one object (got null)"),
        (b"[1]", "JSON must be one object (got list)"),
        (b'"xshare"', "JSON must be one object (got string)"),
        (b'{"add": NaN}', "JSON must be one object (malformed: "),
        (b'{"policy": "xshare", "add": 4, "add": 6}', "add must be given once"),
        (b'{"policy": ' + b"[" * 500 + b"]" * 500 + b"}", "JSON must be nested at most 32 levels deep"),
        (b'{"policy": ' + b"[" * 100_000, "JSON must be one object (malformed: "),
        (b'{"policy": ' + b'{"a": ' * 900 + b"1" + b"}" * 901, "JSON must be nested at most 32 levels deep"),
    ],
)
def test_what_is_no_object_never_reaches_a_scheduler(body, line):
    manager = Manager(said(ANSWER))
    answer = make_client(manager).post(PATH, content=body)
    assert (answer.status_code, manager.asked) == (400, [])
    assert answer.json()["error"].startswith(line)


def test_a_refusal_of_all_is_one_line():
    answer = make_client(Manager(refused("k0 = 9: no"), refused("k0 = 9: no"))).post(PATH, json=POST)
    assert (answer.status_code, answer.json()) == (400, {"error": "k0 = 9: no"})


def test_schedulers_that_disagree_are_the_servers_fault():
    manager = Manager(said(ANSWER), refused("no memory"))
    answer = make_client(manager).post(PATH, json=POST)
    assert (answer.status_code, answer.json()) == (500, {"error": "1 of 2 schedulers: no memory"})
    assert [next(iter(body)) for _, body in manager.asked] == ["check"]


@pytest.mark.parametrize(
    ("keys", "given", "read", "switched"),
    [
        ({}, None, 200, 200),
        ({"api_key": "user"}, None, 401, 401),
        ({"api_key": "user"}, "user", 200, 200),
        ({"api_key": "user", "admin_api_key": "admin"}, None, 401, 401),
        ({"api_key": "user", "admin_api_key": "admin"}, "user", 200, 401),
        ({"api_key": "user", "admin_api_key": "admin"}, "admin", 401, 200),
        ({"admin_api_key": "admin"}, None, 200, 401),
        ({"admin_api_key": "admin"}, "wrong", 200, 401),
        ({"admin_api_key": "admin"}, "admin", 200, 200),
    ],
)
def test_the_api_key_guards_reading_and_the_admin_key_switching(keys, given, read, switched):
    manager = Manager(said(ANSWER))
    client = make_client(manager, **keys)
    headers = {"Authorization": f"Bearer {given}"} if given else {}
    assert client.get(PATH, headers=headers).status_code == read
    assert client.post(PATH, json=POST, headers=headers).status_code == switched
    asked = [next(iter(body), "get") for _, body in manager.asked]
    assert asked == ["get"] * (read == 200) + ["check", "commit"] * (switched == 200)
