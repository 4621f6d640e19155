"""Weights on disk are a model that pages; experiment `paged`, with stand-in servers but in the long test."""

import pytest
import torch

from benchmark.common.rounds import serve
from benchmark.common.variant import OFF, Variant, parse_variant
from benchmark.gpu import models, paged
from benchmark.gpu.models import CONFIGS, write_model
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


def test_what_is_written_once_is_a_model_whose_rows_agree(checkpoint, monkeypatch):
    model = load_model(checkpoint)  # raises where a tensor is missing and random: routers would be none that it finds
    tokens = torch.randint(512, (64, 8), generator=torch.Generator().manual_seed(1))
    logits = router_logits(model, tokens)[:, :, -1]
    assert logits.shape == (2, 64, 32)
    assert all(0.5 < layer.var(correction=0) < 2 for layer in logits)
    for layer in logits:  # what the rows have in common, of all that varies
        assert 0.25 < layer.mean(0).var() / layer.var(correction=0) < 0.75
    assert (checkpoint / INDEX).read_text().count(".experts.") == 2 * 32 * 3
    monkeypatch.setattr("benchmark.gpu.weights.save_file", lambda *_, **__: pytest.fail("written again"))
    write_weights(checkpoint, models.read_config("small"))


@pytest.mark.long
def test_a_server_that_pages_what_was_written_computes_as_one_that_does_not(checkpoint):
    some = Variant("paged", None, {}, ("--enable-paged-experts", "--paged-experts-num-resident", "16"))
    with serve(checkpoint, [some, parse_variant(OFF)], ["--dtype", "float32"]) as servers:
        found = paged.compare(*servers, vocabulary=512)
    assert found["farthest"] < 1e-3
    assert found["tokens_same"] > 0.9
