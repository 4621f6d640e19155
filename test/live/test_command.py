"""`sglang-xshare policy`: what it sends and prints, and one line and exit code 1 for whatever goes wrong."""

import json

import pytest

from live.fake import ANSWER
from refused import read_refusal
from sglang_xshare.cli import main
from sglang_xshare.live import PATH
from sglang_xshare.live.client import Client, PolicyError


@pytest.fixture
def server(answering):
    return answering(ANSWER)


def test_get_prints_the_plan_in_force(server, capsys):
    assert main(["policy", "get", server.url + "/"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for words in ("xshare", "24", "default", "plan 0a1b2c3d; switches: 3", "at most 16"):
        assert words in out
    assert "since the last: active experts: 14.5 -> 6.2, kept mass: 0.8750, policy steps: 2" in out
    assert server.asked == [("GET", PATH, None, None)]


def test_get_prints_what_an_estimate_is_now(answering, capsys):
    plan = ANSWER["in_force"] | {"acceptance": "auto"}
    for estimated, shown in ((0.859375, True), (None, False)):  # a step of one token has no drafts
        server = answering(ANSWER | {"in_force": plan, "estimated_acceptance": estimated})
        assert main(["policy", "get", server.url]) == 0
        out = capsys.readouterr().out
        assert (", now " in out, "auto, now 0.859" in out) == (shown, shown)


def test_get_prints_vanilla_for_a_server_that_only_chooses_the_depth_of_drafts(answering, capsys):
    told = {"policy": "vanilla", "in_force": {"policy": "vanilla"}, "draft_depth": {"batch_sizes": []}}
    assert main(["policy", "get", answering(told).url]) == 0
    assert "vanilla" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "override", "marked"),
    [
        ({"layers": {"1": {"k0": 2}}}, {"layers": "1", "k0": 2}, {"add", "phases"}),
        ({"by_rows": {"2-4": {"k0": 2}}}, {"by_rows": "2-4", "k0": 2}, {"add", "phases"}),
        ({"mass": "fast"}, {"by_rows": "2-7", "mass": 0.8}, {"add", "phases"}),
        ({}, {"by_rows": "2-7", "mass": 0.85}, {"add", "phases", "overrides"}),
    ],
    ids=["layers", "by_rows", "a word", "a preset's own"],
)
def test_what_was_given_is_not_marked_as_default(given, override, marked, answering, capsys):
    plan = ANSWER["in_force"] | {"overrides": [override]}
    server = answering(ANSWER | given | {"in_force": plan})
    assert main(["policy", "get", server.url]) == 0
    rows = [[cell.strip() for cell in line.split("│")[1:]] for line in capsys.readouterr().out.splitlines()]
    assert {row[0] for row in rows if len(row) > 2 and row[2] == "default"} == marked


@pytest.mark.parametrize(
    ("words", "config", "sent"),
    [
        (["xshare:k0=1,add=6"], None, {"policy": "xshare", "k0": 1, "add": 6}),
        (["vanilla"], None, {"policy": "vanilla"}),
        (['oea:{"k0": 3}'], None, {"policy": "oea", "k0": 3}),
        (["oea:k0=3"], {"layers": {"1": {"k0": 2}}}, {"policy": "oea", "k0": 3, "layers": {"1": {"k0": 2}}}),
        ([], {"policy": "oea", "k0": 3}, {"policy": "oea", "k0": 3}),
        (["oea", "--exact-by-default"], None, {"policy": "oea", "exact": {"default": True}}),
    ],
)
def test_set_sends_what_is_spelt(words, config, sent, server, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        words = [*words, "--config", str(tmp_path / "config.json")]
    assert main(["policy", "set", server.url, *words]) == 0
    assert server.asked == [("POST", PATH, None, sent)]


def test_warnings_go_to_stderr(server, capsys):
    server.answer = 200, ANSWER | {"warnings": ["never drops"]}
    assert main(["policy", "set", server.url, "xshare"]) == 0
    assert capsys.readouterr().err == "warning: never drops\n"


ADMIN = {"SGLANG_ADMIN_API_KEY": "of the environment"}


@pytest.mark.parametrize(
    ("words", "keys", "environment", "sent"),
    [
        (["get"], ["--api-key", "user"], {}, "user"),
        (["get"], [], {"SGLANG_API_KEY": "of the environment"}, "of the environment"),
        (["get"], ["--api-key", "user"], ADMIN, "user"),
        (["set", "xshare"], ["--api-key", "user", "--admin-api-key", "admin"], {}, "admin"),
        (["set", "xshare"], ["--api-key", "user"], {}, "user"),
        (["set", "xshare"], ["--api-key", "user"], ADMIN, "of the environment"),
    ],
)
def test_each_route_is_asked_with_its_key(words, keys, environment, sent, server, monkeypatch):
    for name, key in environment.items():
        monkeypatch.setenv(name, key)
    assert main(["policy", words[0], server.url, *words[1:], *keys]) == 0
    assert [asked[2] for asked in server.asked] == [f"Bearer {sent}"]


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        ((400, b'{"error": "k0 = 9: must be at most the model\'s top-k, 8"}'), "k0 = 9:"),
        ((400, b'{"message": "a server of another form"}'), "a server of another form"),
        ((401, b'{"error": "Unauthorized"}'), "401: no permission"),
        ((404, b'{"detail": "Not Found"}'), "404: no such route"),
        ((500, b"oh"), "500 Internal Server Error"),
        ((200, b"<html>"), "no answer"),
        ((200, b"{}"), "must be an SGLang server with this package"),
    ],
)
def test_a_refusal_is_one_line_and_status_1(answer, line, server, capsys):
    server.answer = answer
    assert main(["policy", "set", server.url, "xshare:k0=9"]) == 1
    assert read_refusal(capsys).startswith(f"policy set: {server.url}: {line}")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "policy must be given"),
        (["xshare", "--exact-by-default", "--config", "exact.json"], 'exact = {"priority": 3} and {"default": true}:'),
        (["xshare:k0"], "policy 'xshare:k0':"),
        (["xshare", "--config", "missing.json"], "--config missing.json:"),
        (["xshare", "--config", "bad.json"], "--config bad.json:"),
        (["xshare", "--config", "list.json"], "--config list.json:"),
        (["--config", "keys.json"], "policy must be given"),
        (["xshare:k0=1", "--config", "keys.json"], "k0 = 1 and 2:"),
        (["xshare", "--config", "whole.json"], "policy = 'xshare' and 'oea':"),
    ],
)
def test_what_cannot_be_sent_never_is(words, line, server, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = {"bad": "{", "list": "[]", "keys": '{"k0": 2}', "whole": '{"policy": "oea"}'}
    for name, text in (texts | {"exact": '{"exact": {"priority": 3}}'}).items():
        (tmp_path / f"{name}.json").write_text(text)
    assert main(["policy", "set", server.url, *words]) == 1
    assert read_refusal(capsys).startswith(f"policy set: {line}")
    assert server.asked == []


def test_upstreams_refusal_is_one_line(server):
    server.answer = 400, b'{"error": {"message": "Custom logit processor:\\nnot enabled", "code": 400}}'
    with pytest.raises(PolicyError) as refused:
        Client(server.url).ask("/generate", {})
    assert str(refused.value) == f"{server.url}: Custom logit processor: not enabled"
    assert refused.value.status == 400


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "http://127.0.0.1:1", "http://", "http://h:port", "ftp://host"])
def test_no_server_is_one_line(url, capsys):
    assert main(["policy", "get", url]) == 1
    assert read_refusal(capsys).startswith((f"policy get: {url}: no ", f"policy get: {url}: must be a URL such as "))
