"""Policies on a running server: its figures in an offline record, and a server that is left as it was found."""

import pytest

from benchmark.common.command import one_line_errors
from benchmark.common.record import read_record
from benchmark.quality import __main__ as command
from tune.fake import FakeServer

COUNTS = ("--per-domain", "4", "--prompt", "8", "--steps", "12", "--batch", "4")
BEFORE = {"policy": "xshare", "k0": 1, "add": 9}
FEW, MANY = "xshare:k0=1,add=2", "xshare:k0=1,add=24"


class Answering(FakeServer):
    """Answers every prompt with 1, and verifies as it decodes."""

    draft_tokens = 1

    def get_draft_tokens(self):
        return self.draft_tokens

    def flush(self):
        pass

    def tokenize(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def generate(self, prompts, tokens, **sampling):
        assert len(prompts) == 4
        info = {"completion_tokens": 13, "spec_verify_ct": 6}
        return [{"text": " 1\n", "output_ids": [7] * tokens, "meta_info": info}] * len(prompts)


@pytest.fixture
def server(tokenizer, monkeypatch):
    fake = Answering()
    fake.policy, fake.tokenizer = BEFORE, tokenizer
    monkeypatch.setattr(command, "find_instrument", lambda url, key: fake)
    return fake


@pytest.fixture
def ask(server, checkpoint, tmp_path):
    """Call it with further arguments for the points of the record."""

    def run(*args):
        texts = "--texts", str(checkpoint / "heldout")
        command.main(["--url", "http://fake", *texts, *COUNTS, "--out", str(tmp_path), *args])
        return read_record(tmp_path / "quality.json")["points"]

    return run


def test_the_record_is_that_of_an_offline_decode(ask, server, measure, tmp_path):
    found = ask(FEW, MANY, "--api-key", "secret")
    assert "secret" not in (tmp_path / "quality.json").read_text()
    offline = measure(command.main, "quality", *COUNTS, FEW)
    assert list(found) == ["vanilla", FEW, MANY]
    for batches in ("one_domain", "mixed"):
        ours, theirs = (points[FEW][batches] for points in (found, offline))
        assert ours.keys() == theirs.keys() - {"layers"}
        keys = [(one["loss"].keys(), one["loss"]["all"].keys(), one["divergence"].keys()) for one in (ours, theirs)]
        assert keys[0] == keys[1]
    vanilla, few, many = (point["mixed"] for point in found.values())
    assert [one["active_experts"] for one in (vanilla, few, many)] == [40.0, 10.0, 32.0]
    assert [one["kept_mass"] for one in (vanilla, few)] == [1.0, 0.9]
    assert few["loss"]["all"]["delta"] > many["loss"]["all"]["delta"] > vanilla["loss"]["all"]["delta"] == 0
    assert few["divergence"]["nats"] == pytest.approx(few["loss"]["all"]["delta"], rel=1e-4)
    assert (few["agreement"], few["answers_right"], few["answers"]) == (1, 1, 4)
    assert "accepted" not in few
    assert server.policy == BEFORE
    assert [one.get("add") for one in server.switched] == [None, None, 2, 2, 24, 24, 9]


def test_drafts_are_verified(ask, server):
    server.draft_tokens = 4
    server.share = 4.0  # rows of a request in a step
    assert ask(FEW)[FEW]["mixed"]["accepted"] == 2.0


@pytest.mark.parametrize(
    ("args", "share", "line"),
    [
        ((FEW,), 0.4, "1.6 rows a step in place of 4"),
        (("observe",), 1.0, "policy must select (got observe"),
        ((FEW, "--tokens-per-request", "4"), 1.0, "--tokens-per-request must be 1 with --url"),
        (('xshare:{"by_rows": {"1-8": {"policy": "vanilla"}}}',), 1.0, "--batch must be a size at which xshare:{"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(args, share, line, ask, server):
    server.share = share
    with pytest.raises(SystemExit) as stop, one_line_errors("quality"):
        ask(*args)
    assert line in str(stop.value.code)
    assert "\n" not in str(stop.value.code)
    assert server.policy == BEFORE
