"""Weights on disk and experiment `paged`, as far as a CPU goes: what is written is a model that pages; servers are
stand-ins but in the long test.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from gpu.recorded import served, write_record

from benchmark.common.rounds import serve
from benchmark.common.variant import OFF, Variant, parse_variant
from benchmark.gpu import memory, models, paged
from benchmark.gpu.models import CONFIGS, write_model
from benchmark.gpu.serving import SERVER_ARGS
from benchmark.gpu.weights import INDEX, write_weights
from benchmark.quality.model import load_model, router_logits

SMALL = {"hidden_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 32}


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A small model of the same family, with weights."""
    monkeypatch.setitem(CONFIGS, "small", CONFIGS["qwen3-30b-a3b"] | SMALL)
    folder = write_model("small", tmp_path)
    write_weights(folder, models.read_config("small"))
    return folder


def test_what_is_written_is_a_model_whose_rows_agree(checkpoint):
    model = load_model(checkpoint)  # raises where a tensor is missing and random: routers would be none that it finds
    tokens = torch.randint(512, (64, 8), generator=torch.Generator().manual_seed(1))
    logits = router_logits(model, tokens)[:, :, -1]
    assert logits.shape == (2, 64, 32)
    assert all(0.5 < layer.var(correction=0) < 2 for layer in logits)
    for layer in logits:  # what the rows have in common, of all that varies
        assert 0.25 < layer.mean(0).var() / layer.var(correction=0) < 0.75


def test_every_tensor_is_indexed_and_nothing_is_written_twice(checkpoint, monkeypatch):
    from safetensors import safe_open

    files = sorted(checkpoint.glob("*.safetensors"))
    assert len(files) == 3
    index = (checkpoint / INDEX).read_text()
    for file in files:
        with safe_open(file, "pt") as opened:
            assert all(f'"{name}": "{file.name}"' in index for name in opened.keys())  # noqa: SIM118
    assert index.count(".experts.") == 2 * 32 * 3
    monkeypatch.setattr("benchmark.gpu.weights.save_file", lambda *_, **__: pytest.fail("written again"))
    write_weights(checkpoint, models.read_config("small"))


def test_servers_load_weights_and_page_half_of_the_experts():
    flags = paged.list_flags()
    assert "dummy" not in flags
    assert "--load-format" not in flags
    assert flags[-len(SERVER_ARGS) + 2 :] == list(SERVER_ARGS[2:])
    for variant in paged.VARIANTS:
        assert variant.args[-1] == str(models.read_config(paged.MODEL)["num_experts"] // 2)


class Answers:
    """A server that gives these log-probabilities to a prompt's tokens, and these tokens after it."""

    def __init__(self, logs, tokens):
        self.logs, self.tokens = logs, tokens

    def generate(self, prompts, request, **sampling):
        assert request["logprob_start_len"] == 0
        told = [[None, 0, None], *[[log, 1, None] for log in self.logs]]
        return [{"meta_info": {"input_token_logprobs": told}, "output_ids": self.tokens} for _ in prompts]


def test_what_paging_computes_is_compared_token_by_token():
    found = paged.compare(Answers([-1.0, -2.0], [1, 2, 3, 4]), Answers([-1.0, -2.5], [1, 2, 3, 5]), vocabulary=100)
    assert found == {"farthest": 0.5, "mean": 0.25, "tokens_same": 0.75}
    (row,) = paged.rows({paged.SAME: found})
    assert (row.measured, row.verdict) == ("0.500 nats, 75% of greedy tokens the same", "miss")


def test_it_goes_on_where_its_record_ends(tmp_path, monkeypatch):
    started, measured = [], []

    @contextmanager
    def start(folder, variants, flags, deadline):
        started.append([variant.name for variant in variants])
        yield [SimpleNamespace(name=variant.name) for variant in variants]

    def measure_rounds(record, key, *args):
        measured.append(key)
        point = served(100.0, 150.0)
        for evidence in point["series"][1]["evidence"]:
            evidence |= {"page_ins": 4.1, "page_ins_before": 18.2}
        record.add(key, **point)

    monkeypatch.setattr(paged, "find_tree", lambda: SimpleNamespace(release=models.PAGED_SINCE))
    monkeypatch.setattr(paged, "serve", start)
    monkeypatch.setattr(paged, "check_caches", lambda servers: None)
    monkeypatch.setattr(paged, "measure_rounds", measure_rounds)
    monkeypatch.setattr(paged, "write_model", lambda name: tmp_path)
    monkeypatch.setattr(paged, "write_weights", lambda *_: None)
    monkeypatch.setattr(paged, "compare", lambda *_: {"farthest": 0.01, "mean": 0.0, "tokens_same": 1.0})
    monkeypatch.setattr(memory, "read_free_bytes", lambda: 70 << 30)
    record = write_record(tmp_path, "paged", {})
    paged.measure(record, [])
    assert started == [["off, paged", f"{paged.POLICY}, paged", "off"]]
    assert measured == [f"concurrency={n}" for n in paged.CONCURRENCIES]
    paged.measure(record, [])
    assert len(started) == 1
    same, *gains = paged.rows(record.points)
    assert same.verdict == "pass"
    assert len(gains) == 4
    assert "page-ins 18.2 -> 4.1" in gains[0].what
    assert gains[0].measured.endswith("50.0 % gain")


def test_a_release_that_does_not_page_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(paged, "find_tree", lambda: SimpleNamespace(release="0.5.22"))
    monkeypatch.setattr(paged, "write_model", lambda name: pytest.fail("a model was written"))
    with pytest.raises(ValueError, match=r"0\.5\.22"):
        paged.measure(write_record(tmp_path, "paged", {}), [])


@pytest.mark.long
def test_a_server_that_pages_what_was_written_computes_as_one_that_does_not(checkpoint):
    some = Variant("paged", None, {}, ("--enable-paged-experts", "--paged-experts-num-resident", "16"))
    with serve(checkpoint, [some, parse_variant(OFF)], ["--dtype", "float32"]) as servers:
        found = paged.compare(*servers, vocabulary=512)
    assert found["farthest"] < 1e-3
    assert found["tokens_same"] > 0.9
