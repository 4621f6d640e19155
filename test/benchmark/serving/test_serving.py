"""The command that compares policies in the server, small and for real."""

import pytest

from benchmark.common.record import read_record
from benchmark.records.experiments import CHOSEN, EXPERIMENTS
from benchmark.serving import __main__ as command
from benchmark.serving import measure
from benchmark.serving.report import KEY, quality_key


@pytest.mark.long
def test_one_round_for_real_and_nothing_more_when_it_is_resumed(tiny_model, tmp_path, monkeypatch):
    """Two policies on one server, and one without; also alone, as a busy machine may not decode requests together."""
    sizes = ["--rounds", "1", "--requests", "4", "--concurrency", "4", "--output-tokens", "4"]
    sizes += ["--per-domain", "1", "--loss-tokens", "8", "--sums", "4"]
    policies = ["off", "xshare:k0=1,add=2,min_rows=1", "pruned:k0=1,min_rows=1"]
    arguments = [*policies, "--model", str(tiny_model), *sizes, "--out", str(tmp_path)]
    command.main(arguments)
    points = read_record(tmp_path / "serving.json", "serving")["points"]
    off, xshare, pruned = points[KEY]["series"]
    for one in (off, xshare, pruned):
        assert [(result["completed"], result["total_output_tokens"]) for result in one["results"]] == [(4, 4 * 4)]
    assert off["command"] != xshare["command"] == pruned["command"]
    assert off["evidence"][0]["experts_after"] is None
    (one,), (other,) = xshare["evidence"], pruned["evidence"]
    assert 1 <= other["experts_after"] < one["experts_after"] < one["experts_before"]
    nats = [points[quality_key(name)]["nats"] for name in policies]
    assert [len(one) for one in nats] == [4, 4, 4]
    assert sum(nats[0]) < sum(nats[2])  # one expert in eight costs more than noise
    assert points[quality_key("off")]["sums"] >= 0.5
    monkeypatch.setattr(measure, "serve", lambda *_: pytest.fail("served again"))
    command.main([*arguments, "--resume"])


@pytest.mark.parametrize("name", ["serving", "drafts-1x8", "drafts-4x16"])
def test_a_record_scores_other_text_than_its_policies_were_chosen_on(name, tmp_path, monkeypatch):
    def load(texts, model, length, per_domain, skip=0):
        raise EOFError(skip * length)

    monkeypatch.setattr(measure, "prepare", lambda _: [])
    monkeypatch.setattr(measure, "load_sequences", load)
    with pytest.raises(EOFError) as stopped:
        command.main([*EXPERIMENTS[name].arguments.split(), "--out", str(tmp_path)])
    assert CHOSEN <= stopped.value.args[0] < CHOSEN + 97
