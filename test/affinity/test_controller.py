"""What SGLang's controller and tokenizer call: requests go to workers, and what ends is told."""

import logging
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from affinity.tables import make_table, prompt
from sglang_xshare import hooks
from sglang_xshare.affinity import METHOD, controller
from sglang_xshare.affinity.controller import PREFIX, Dispatcher
from sglang_xshare.affinity.decision import Affinity
from sglang_xshare.affinity.finished import WatchedRequests

io_struct = pytest.importorskip("sglang.srt.managers.io_struct", reason="needs an installed SGLang")


class Controller(SimpleNamespace):
    """As much of SGLang's as the dispatcher touches; `maybe_external_dp_rank_routing` sends as SGLang's does."""

    def maybe_external_dp_rank_routing(self, request: Any) -> bool:
        if request.routed_dp_rank is not None:
            io_struct.sock_send(self.workers[request.routed_dp_rank], request)
        return request.routed_dp_rank is not None


@pytest.fixture
def sent(monkeypatch):
    """(replica, request id) of all that was sent: a worker's socket is its number here."""
    found: list[tuple[int, str]] = []
    monkeypatch.setattr(io_struct, "sock_send", lambda worker, request: found.append((worker, request.rid)))
    return found


def make(replicas: int = 2, export: bool = False) -> Dispatcher:
    workers = list(range(replicas))
    controller = Controller(workers=workers, status=[True] * replicas, _active_workers=workers)
    controller.passed = []
    controller.send_control_message = controller.passed.append
    return Dispatcher(controller, Affinity(make_table(), replicas, 1.25), export)


def request(rid: str, topic: int = 0, **fields: Any) -> SimpleNamespace:
    usual: dict[str, Any] = {"routed_dp_rank": None, "session_params": None, "session_id": None, "routing_key": None}
    tokens = array("q", prompt(topic))
    usual |= {"input_ids": tokens, "extra_key": None, "lora_id": None}
    return SimpleNamespace(rid=rid, **{**usual, **fields})


def test_what_decides_beside_experts(sent):
    """SGLang's own choice of a replica is kept and counted; a replica that is down or removed gets nothing; embeddings
    and health checks go where least runs.
    """
    directed, down, removed, plain = make(), make(), make(), make()
    down._controller.status[0] = False
    removed._controller._active_workers = [1]
    for number in range(3):
        directed(request(f"r{number}", routed_dp_rank=0))
        down(request(f"r{number}"))
        removed(request(f"r{number}"))
    assert [replica for replica, _ in sent] == [0, 1, 1] * 3
    assert directed.affinity.loads == [3, 0]
    sent.clear()
    plain(SimpleNamespace(rid="r0", routed_dp_rank=None, input_ids=None))  # an embedding request has no sessions
    plain(request("HEALTH_CHECK_1"))
    assert [replica for replica, _ in sent] == [0, 1]
    assert plain.decide(request("HEALTH_CHECK_2")).reason == "load"


IMAGE = {"mm_inputs": object()}


@pytest.mark.parametrize(
    ("own", "others"),
    [({"extra_key": "tenant"}, {"extra_key": "another"}), ({"lora_id": "a"}, {"lora_id": "b"}), (IMAGE, {})],
    ids=["tenant", "adapter", "image"],
)
def test_a_directed_requests_prompt_is_found_again(sent, own, others):
    """Under the salt with which others ask. Another image is another prompt, though both stand in it as same ids."""
    dispatcher, long = make(4), array("q", prompt(0, length=320, start=99))
    for name, replica, fields in (("directed", 3, own), ("again", None, own), ("other", None, others)):
        dispatcher(request(name, routed_dp_rank=replica, input_ids=long, **fields))
        dispatcher.affinity.finish(name)
    first, again, other = (replica for replica, _ in sent)
    assert first == 3
    assert (again == 3) == (own is not IMAGE)
    assert other != 3


@pytest.mark.parametrize("field", ["routing_key", "session_id", "session_params"])
@pytest.mark.parametrize("directed", [False, True])
def test_a_conversation_stays_where_it_began(sent, field, directed):
    """It is told by what SGLang knows, also if its first request was directed."""
    dispatcher = make(4)
    name: Any = SimpleNamespace(id="s") if field == "session_params" else "s"
    dispatcher(request("first", routed_dp_rank=2 if directed else None, **{field: name}))
    home = sent[0][0]
    dispatcher.affinity.finish("first")
    for number in range(4):
        dispatcher.affinity.choose(f"d{number}", [], replica=number)
    assert home == 2 or not directed
    assert dispatcher.decide(request("second", 3, **{field: name})).replica == home


def test_a_routing_key_comes_before_a_session_id(sent):
    dispatcher = make()
    dispatcher(request("first", routing_key="key", session_id="id"))
    dispatcher.affinity.finish("first")
    assert dispatcher.decide(request("second", routing_key="key")).reason == "sticky"


def test_the_log_says_who_got_what(sent, monkeypatch, caplog):
    """Once in ten seconds, and what came since the line before."""
    times = iter([0.0, 9.0, 10.0, 19.0, 20.0])
    monkeypatch.setattr(controller, "time", SimpleNamespace(monotonic=lambda: next(times)))
    dispatcher = make()
    with caplog.at_level(logging.INFO):
        for number in range(4):
            dispatcher(request(f"r{number}", routed_dp_rank=1))
    line = "Expert affinity: 2 requests, directed 100.0%; by replica: 0 2; running: 0 {}, imbalance: 2.00"
    assert caplog.messages == [line.format(running) for running in (2, 4)]


@pytest.fixture
def _no_metrics_of_others():
    """Metrics of this test alone: prometheus registers each name once."""
    before = set(REGISTRY._collector_to_names)
    for metric in [one for one in before if any(name.startswith(PREFIX) for name in REGISTRY._collector_to_names[one])]:
        REGISTRY.unregister(metric)
    yield
    for metric in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(metric)


@pytest.mark.usefixtures("_no_metrics_of_others")
def test_metrics_have_what_each_replica_runs_at_the_last_decision(sent):
    dispatcher = make(export=True)
    for name, replica in (("r0", 1), ("r1", 1), ("r2", 0)):
        dispatcher(request(name, routed_dp_rank=replica))
    dispatcher.affinity.finish("r0")
    running = [REGISTRY.get_sample_value(f"{PREFIX}running_requests", {"replica": str(place)}) for place in range(2)]
    assert running == [1, 2]
    assert dispatcher._counts._metrics[1]._multiprocess_mode == "mostrecent", "one process counts for all"
    labels = {"replica": "1", "reason": "directed"}
    assert REGISTRY.get_sample_value(f"{PREFIX}requests_total", labels) == 2


@pytest.mark.usefixtures("_no_metrics_of_others")
@pytest.mark.parametrize("cached", [True, False])
def test_a_dispatcher_is_as_the_flags_say(cached, tmp_path, monkeypatch):
    """A prompt that comes again is worth nothing where prefixes are not cached."""
    monkeypatch.setattr("sglang_xshare.affinity.arguments.resolved", lambda server_args: server_args)
    make_table().save(tmp_path / "table")
    flags = {"load_balance_method": METHOD, "expert_affinity": str(tmp_path / "table"), "expert_affinity_bound": 1.5}
    flags |= {"dp_size": 3, "disable_radix_cache": not cached, "enable_metrics": cached}
    dispatcher = hooks.dispatcher(Controller(server_args=SimpleNamespace(**flags), send_control_message=None))
    affinity = dispatcher.affinity
    assert (len(affinity.loads), affinity.bound, affinity.caches) == (3, 1.5, cached)
    assert (dispatcher._counts._metrics is not None) == cached


WAYS: dict[str, Callable[[Any], object]] = {
    "del": lambda states: states.__delitem__("a"),
    "pop": lambda states: states.pop("a"),
    "popitem": lambda states: states.popitem(),
    "clear": lambda states: states.clear(),
    "another state": lambda states: states.__setitem__("a", 2),
    "update": lambda states: states.update({"a": 2}),
    "|=": lambda states: states.__ior__({"a": 2}),
    "pop of another": lambda states: states.pop("b", None),
    "another request": lambda states: states.update(b=2),
    "setdefault": lambda states: states.setdefault("a", 2),
    "the same state": lambda states: states.update(a=states["a"]),
    "reading": lambda states: (states.get("a"), "a" in states, len(states), list(states.items())),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_out_of_the_states_is_told(way):
    told: list[str] = []
    states, plain = WatchedRequests({"a": 1}, told.append), {"a": 1}
    for one in (states, plain):
        WAYS[way](one)
    assert dict(states) == plain
    assert told == ([] if plain.get("a") == 1 else ["a"])


def test_the_controller_receives_what_the_tokenizer_reports(sent):
    """By SGLang's own dispatcher of messages, which sends any other control message to the workers."""
    from sglang.srt.managers.data_parallel_controller import DataParallelController

    dispatcher, told = make(), []
    controller = dispatcher._controller
    handlers = "dispatching_with_trace dispatch_batch_generate dispatch_batch_embedding send_to_all_workers"
    for name in [*handlers.split(), "update_active_ranks", "add_elastic_workers"]:
        setattr(controller, name, None)
    DataParallelController.init_dispatcher(controller)
    states = {"r0": object(), "r1": object()}
    server_args = SimpleNamespace(load_balance_method=METHOD)
    manager = SimpleNamespace(server_args=server_args, rid_to_state=states, _dispatch_to_scheduler=told.append)
    hooks.watch_requests(manager, None)
    for name in states:
        dispatcher(request(name))
    del manager.rid_to_state["r0"]
    other = io_struct.RpcReqInput(method="other", rid="r1")
    for message in (*told, other):
        controller._request_dispatcher(io_struct.msgpack_decode(io_struct.msgpack_encode(message)))
    assert sum(dispatcher.affinity.loads) == 1
    assert controller.passed == [other]


def test_another_method_leaves_everything_as_it_was():
    states: dict[str, Any] = {}
    server_args = SimpleNamespace(load_balance_method="round_robin", expert_affinity=None, expert_affinity_bound=None)
    manager = SimpleNamespace(server_args=server_args, rid_to_state=states)
    hooks.watch_requests(manager, None)
    assert manager.rid_to_state is states
    assert hooks.dispatcher(SimpleNamespace(server_args=server_args)) is None
