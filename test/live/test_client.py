"""Who answers the subcommands: a server on this machine without any proxy, others through that of the environment."""

import json
from types import SimpleNamespace

import pytest

from refused import read_refusal
from sglang_xshare.cli import main
from sglang_xshare.live import PATH
from sglang_xshare.live.client import SWITCH_TIMEOUT, TIMEOUT, Client, find_proxy

ANSWER = {"policy": "vanilla", "in_force": {}}
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")


@pytest.fixture
def proxied(monkeypatch):
    """Call it with a proxy for the environment that names this one alone."""

    def name(proxy, **more):
        for variable in (*PROXIES, *map(str.upper, PROXIES)):
            monkeypatch.delenv(variable, raising=False)
        for variable, value in {"http_proxy": proxy, "https_proxy": proxy, **more}.items():
            monkeypatch.setenv(variable, value)

    return name


def test_a_switch_has_the_time_of_a_capture(monkeypatch):
    waits, body = [], json.dumps(ANSWER).encode()
    monkeypatch.setattr(Client, "read", lambda self, path, given, timeout, *, admin: waits.append(timeout) or body)
    client = Client("http://127.0.0.1:30000")
    assert client.get_policy() == client.set_policy({"policy": "vanilla"}) == ANSWER
    assert waits == [TIMEOUT, SWITCH_TIMEOUT]


@pytest.mark.parametrize("status", [200, 401, 403, 404, 407, 503])
def test_an_error_names_the_proxy_that_answered(status, answering, proxied, capsys):
    proxy = answering(b"")
    proxy.answer, proxy.name = (status, b"<html>denied</html>"), "squid/6.1"
    proxied(proxy.url.replace("//", "//user:secret@"))
    assert main(["policy", "get", "http://gpu.example:30000"]) == 1
    line = read_refusal(capsys)
    assert line.startswith("policy get: http://gpu.example:30000: ")
    assert f"; answered by squid/6.1; asked through the proxy {proxy.url} of the environment" in line
    assert "secret" not in line
    assert [path for _, path, *_ in proxy.asked] == [f"http://gpu.example:30000{PATH}"]


def test_a_proxy_that_is_not_there_is_named(proxied, capsys):
    proxied("http://127.0.0.1:1")
    assert main(["policy", "get", "http://gpu.example:30000"]) == 1
    assert "; asked through the proxy http://127.0.0.1:1 of the environment" in read_refusal(capsys)


def test_an_answer_of_something_else_is_not_sglangs(answering, proxied, capsys):
    """A server on this machine is asked without the proxy, which is not there."""
    proxied("http://127.0.0.1:1")
    server = answering(b"{}")
    server.name = "nginx"
    for status, line in ((200, "must be an SGLang server with this package"), (404, "404: no such route")):
        server.answer = status, b"{}"
        assert main(["policy", "get", server.url]) == 1
        said = read_refusal(capsys)
        assert line in said
        assert said.endswith("; answered by nginx\n")
        assert "proxy" not in said


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("words", [["get"], ["set", "vanilla"]], ids=["get", "set"])
def test_a_redirect_is_refused(words, status, answering, proxied, capsys):
    """Following it would send the key to another host, and GET in place of POST: nothing would be switched."""
    proxied("http://127.0.0.1:1")
    server, other = answering(b""), answering(ANSWER)
    server.answer, server.location = (status, b""), other.url + PATH
    assert main(["policy", words[0], server.url, *words[1:], "--api-key", "secret"]) == 1
    reason = f"{status}: redirected to {other.url}{PATH}; the URL must be the server's own"
    assert read_refusal(capsys) == f"policy {words[0]}: {server.url}: {reason}\n"
    assert other.asked == []


@pytest.mark.parametrize("key", ["secret\n", "secret\r\nX: 1", "sécret", "secret\x7f"])
@pytest.mark.parametrize("variable", ["SGLANG_API_KEY", "SGLANG_ADMIN_API_KEY"])
def test_a_key_that_no_header_can_have_is_not_printed(variable, key, monkeypatch, capsys):
    """As of a variable that was read from a file with a line end."""
    monkeypatch.setenv(variable, key)
    assert main(["policy", "set", "http://127.0.0.1:1", "vanilla"]) == 1
    assert read_refusal(capsys) == "policy set: --api-key and --admin-api-key must be printable ASCII\n"


DIRECT = [
    *("http://127.0.0.1:30000", "http://127.8.9.10:30000", "http://[::1]:30000", "http://0.0.0.0:30000"),
    *("http://localhost:30000", "https://LOCALHOST:30000", "http://node.localhost:30000"),
    *("http://gpu.inside:30000", "http://gpu.port:30000"),
]
PROXIED = ["http://gpu.port:30001", "http://gpu.example:30000", "https://10.0.0.3:30000", "http://localhost.example:1"]


@pytest.mark.parametrize("url", DIRECT + PROXIED)
def test_which_hosts_are_asked_directly(url, proxied):
    proxied("http://proxy:3128", no_proxy=".inside,gpu.port:30000")
    assert find_proxy(url) == ("http://proxy:3128" if url in PROXIED else None)


@pytest.mark.parametrize(("ago", "asks"), [(0.0, 1), (0.25, 2), (None, 1)])
def test_counters_are_no_older_than_the_question(ago, asks, answering, proxied, monkeypatch):
    """Another client may have asked just before: the server then repeats what it counted for that one."""
    proxied("http://127.0.0.1:1")
    waits = []
    monkeypatch.setattr("sglang_xshare.live.client.time", SimpleNamespace(sleep=waits.append))
    server = answering(ANSWER | {"counted_ago": ago})
    Client(server.url).get_policy()
    assert len(server.asked) == asks
    assert waits == ([] if asks == 1 else [pytest.approx(0.76)])
