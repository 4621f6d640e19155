"""Policies on a running server: its figures in an offline record, and a server that is left as it was found."""

import json
from copy import deepcopy

import pytest
from tokenizers import Tokenizer

from benchmark.common.command import one_line_errors
from benchmark.quality import __main__ as command
from benchmark.quality.instrument import Instrument
from sglang_xshare.live.client import PolicyError
from sglang_xshare.tune.server import Forced

COUNTS = ("--per-domain", "4", "--prompt", "8", "--steps", "12", "--batch", "4")
LOSS = {"observe": 0.0, "vanilla": 0.0, "xshare": 0.5, "oea": 0.25}
LAYERS = 2


class FakeServer(Instrument):
    """Loses what its policy loses, has 6 of 10 experts active in its first layer under one, answers sums with 1."""

    draft_tokens = 1
    rows = 1.0
    observes = True
    captured: tuple[int, ...] = ()

    def __init__(self, encoder):
        self.url = "http://fake"
        self.encoder = encoder
        self.policy = {"policy": "moe-spec", "budget": 9}
        self.switched = []
        names = ("layer_steps", "experts_before", "experts_after", "kept_mass", "rows")
        self.totals = self.began = [dict.fromkeys(names, 3) for _ in range(LAYERS)]
        self.forced = 0

    def set_policy(self, policy):
        policy = {name: value for name, value in policy.items() if name not in ("limits", "since_switch", "counters")}
        if policy["policy"] == "observe" and not self.observes:
            raise PolicyError("http://fake: graphs do not follow")
        self.policy = policy
        self.switched.append(policy["policy"])
        self.forced, self.began = 0, self.totals
        return self.get_policy()

    def get_policy(self):
        selects = self.policy["policy"] not in ("vanilla", "observe")
        counted = 5 if self.forced and (self.observes or selects) else 0
        rows = counted * 4 * self.draft_tokens * self.rows
        names = ("layer_steps", "experts_before", "experts_after", "kept_mass", "rows")
        one = dict(
            zip(names, (counted, 10 * counted, counted * (6 if selects else 10), 0.75 * rows, rows), strict=True)
        )
        layers = [one, dict.fromkeys(one, 0) if selects else one]
        if self.switched:
            self.totals = [{name: self.began[n][name] + layers[n][name] for name in names} for n in range(LAYERS)]
        limits = {"captured_rows": list(self.captured), "moe_layers": [0, 1]}
        counters = {"by_layer": [{"layer": n} | one for n, one in enumerate(self.totals)]}
        since = {"layer_steps": counted, "rows": rows}
        return deepcopy(self.policy) | {"since_switch": since, "counters": counters, "limits": limits}

    def get_model(self):
        return "fake"

    def get_draft_tokens(self):
        return self.draft_tokens

    def flush(self):
        pass

    def tokenize(self, text):
        return self.encoder.encode(text, add_special_tokens=False).ids

    def force(self, prompts, texts, top=2):
        self.forced += 1
        assert len(prompts) == 4
        lost = LOSS[self.policy["policy"]]
        return [self._think(prompt, text, lost) for prompt, text in zip(prompts, texts, strict=True)]

    def _think(self, prompt, text, lost):
        nats = 1 + lost + prompt[0] % 5 * lost / 10
        greedy = [token + (lost > 0.3) for token in text[1:]]
        return Forced([nats] * 12, greedy, [{token: -nats} for token in text[1:]])

    def verify(self, samples, top):
        return self.force([one.prompt for one in samples], [one.text for one in samples], top)

    def generate(self, prompts, tokens, **sampling):
        assert len(prompts) == 4
        info = {"completion_tokens": 13, "spec_verify_ct": 6}
        return [{"text": " 1\n", "output_ids": [7] * tokens, "meta_info": info}] * len(prompts)


@pytest.fixture
def server(checkpoint, monkeypatch):
    fake = FakeServer(Tokenizer.from_file(str(checkpoint / "tokenizer.json")))
    monkeypatch.setattr(command, "Instrument", lambda url, key: fake)
    return fake


@pytest.fixture
def ask(server, checkpoint, tmp_path):
    """Call it with further arguments for the points of the record."""

    def run(*args, texts=True):
        folder = ("--texts", str(checkpoint / "heldout")) if texts else ()
        command.main(["--url", "http://fake", *folder, *COUNTS, "--out", str(tmp_path), *args])
        return json.loads((tmp_path / "quality.json").read_text())

    return run


def test_the_record_is_that_of_an_offline_decode(ask, server, checkpoint, tmp_path):
    found = ask("xshare:k0=1,add=2", "oea:k0=2")
    offline = tmp_path / "offline"
    command.main(["--model", str(checkpoint), *COUNTS, "--out", str(offline), "xshare:k0=1,add=2"])
    recorded = json.loads((offline / "quality.json").read_text())
    assert found.keys() == recorded.keys()
    assert list(found["points"]) == ["vanilla", "xshare:k0=1,add=2", "oea:k0=2"]
    for batches in ("one_domain", "mixed"):
        ours, theirs = (one["points"]["xshare:k0=1,add=2"][batches] for one in (found, recorded))
        assert ours.keys() == theirs.keys()
        assert ours["loss"].keys() == theirs["loss"].keys()
        assert ours["loss"]["all"].keys() == theirs["loss"]["all"].keys()
    point = found["points"]["xshare:k0=1,add=2"]["mixed"]
    assert point["active_experts"] == 8.0
    assert point["layers"] == [{"active_experts": 6, "kept_mass": 0.75}, {"active_experts": 10, "kept_mass": 1}]
    assert point["kept_mass"] == 0.875
    assert point["loss"]["all"]["cross_entropy"] - point["loss"]["all"]["delta"] == pytest.approx(1)
    assert point["loss"]["all"]["delta"] > found["points"]["oea:k0=2"]["mixed"]["loss"]["all"]["delta"] > 0
    assert (point["agreement"], found["points"]["oea:k0=2"]["mixed"]["agreement"]) == (0, 1)
    assert point["divergence"]["nats"] > 0 == found["points"]["vanilla"]["mixed"]["divergence"]["nats"]
    assert (point["answers_right"], point["answers"]) == (1, 4)
    assert "accepted" not in point
    assert server.policy == {"policy": "moe-spec", "budget": 9}
    assert server.switched[:2] == ["observe", "observe"]


def test_it_goes_on_from_its_record(ask, server):
    first = ask("oea:k0=2")
    switched = list(server.switched)
    assert ask("oea:k0=2", "--resume") == first
    assert server.switched == switched
    with pytest.raises(ValueError, match=r"policies = .*--resume"):
        ask("xshare", "--resume")


def test_no_key_comes_into_the_record(ask):
    assert "secret" not in json.dumps(ask("oea:k0=2", "--api-key", "secret"))


def test_drafts_are_verified_and_their_accepted_length_told(ask, server, capsys):
    server.draft_tokens = 4
    assert ask("oea:k0=2")["points"]["oea:k0=2"]["mixed"]["accepted"] == 2.0
    assert "mixed: accepted" in capsys.readouterr().out


def test_prompts_of_one_s_own(ask, server, tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n} + 1 =", "answer": "1"}) + "\n" for n in range(6)))
    point = ask("oea:k0=2", "--prompts", str(file), texts=False)["points"]["oea:k0=2"]
    assert point["mixed"] == point["one_domain"]
    assert set(point["mixed"]["loss"]) == {"all", "mine"}
    assert (point["mixed"]["answers_right"], point["mixed"]["answers"]) == (4, 4)
    assert server.policy["policy"] == "moe-spec"


def test_a_batch_in_which_vanilla_is_not_counted(ask, server):
    server.observes = False
    with pytest.raises(ValueError, match="--batch 4: the server counts no experts of vanilla there"):
        ask("oea:k0=2")
    assert server.switched == ["vanilla", "moe-spec"]


@pytest.mark.parametrize(
    ("args", "change", "line"),
    [
        (("xshare:k0=99999",), {"rows": 0.4}, "1.6 rows a step in place of 4"),
        (("xshare:sum=3",), {}, "sum"),
        (("oea", "--per-domain", "400"), {}, "400 a domain are asked for"),
        (("oea", "--tokens-per-request", "4"), {}, "--tokens-per-request 4 with --url"),
        (("oea", "--top", "4096"), {}, "argument --top: '4096':"),
        (("oea", "--prompts", "nowhere"), {}, "--prompts nowhere and --texts"),
        (("oea",), {"policy": {"policy": "observe"}, "captured": (4,)}, "graphs were captured under observe"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(args, change, line, ask, server):
    for name, value in change.items():
        setattr(server, name, value)
    before = server.policy
    with pytest.raises(SystemExit) as stop, one_line_errors("quality"):
        ask(*args)
    assert line in str(stop.value.code)
    assert "\n" not in str(stop.value.code)
    assert server.policy == before


@pytest.mark.parametrize("flag", ["--prompts", "--api-key"])
def test_flags_of_a_server_need_one(flag, checkpoint, tmp_path):
    with pytest.raises(ValueError, match=f"{flag}:"):
        command.main(["--model", str(checkpoint), *COUNTS, "--out", str(tmp_path), flag, "x"])
