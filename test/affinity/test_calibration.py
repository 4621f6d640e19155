"""A table of the small checkpoint: its experts are those that the model's routers choose."""

from contextlib import nullcontext
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from affinity.tables import ORIGIN
from benchmark.common.paths import ROOT
from benchmark.quality.model import load_model as load_reference
from benchmark.quality.model import router_logits
from refused import read_refusal, refused
from sglang_xshare.affinity import calibration
from sglang_xshare.affinity.calibration import SHRINKAGE, calibrate, load_model, project, read_texts, watch_experts
from sglang_xshare.affinity.table import hash_tokenizer, load_table
from sglang_xshare.cli import main

LENGTH = 64
DRAFT = ROOT / "checkpoints" / "qwen3-moe-tiny-eagle3"


@pytest.fixture(scope="module")
def pieces(tiny_model):
    return read_texts(tiny_model / "heldout", tiny_model, LENGTH, 12 * LENGTH)


def test_the_experts_seen_are_those_of_the_routers(tiny_model, pieces):
    tokens = pieces[:4]
    model = load_reference(tiny_model)
    chosen = router_logits(model, tokens).topk(8).indices
    with torch.inference_mode(), watch_experts(model) as layers:
        model(tokens)
    assert [experts for _, experts in layers] == [64] * 4
    for (ids, _), expected in zip(layers, chosen, strict=True):
        assert torch.equal(ids.sort(1).values, expected.flatten(0, 1).sort(1).values)


class Experts(torch.nn.Linear):
    """A module whose first parameter has a row an expert; it takes what a router hands it."""

    def forward(self, hidden, *routed):
        return hidden


def test_a_call_without_expert_ids_is_no_layers():
    """As of shared experts, or of experts that get weights alone."""
    model = torch.nn.ModuleDict({name: Experts(1, 3) for name in ("shared_experts", "experts")})
    hidden, ids = torch.ones(2, 1), torch.tensor([[0], [2]])
    with watch_experts(model) as layers:
        model["shared_experts"](hidden)
        for routed in (None, hidden, ids):
            model["experts"](hidden, routed)
    model["experts"](hidden, ids)  # after the measurement
    [(found, experts)] = layers
    assert (found.tolist(), experts) == (ids.tolist(), 3)


def test_the_table_tells_domains_apart(tiny_model, pieces):
    """Pieces that it was not measured on are more like pieces of their own domain than like others."""
    assert pieces.shape == (4 * 12, LENGTH)
    held = torch.arange(len(pieces)) % 4 == 3
    table = calibrate(load_model(tiny_model, "cpu"), tiny_model, pieces[~held], 16)
    assert (table.signatures.shape, len(table.samples)) == ((1024, 16), int((~held).sum()))
    assert table.origin == ORIGIN | {"vocabulary": "1024", "tokenizer": hash_tokenizer(tiny_model)}
    signatures = [table.sign(piece.tolist()) for piece in pieces[held]]
    signed = np.stack([signature for signature in signatures if signature is not None])
    assert len(signed) == len(signatures)
    similarity = signed @ signed.T
    domain = np.arange(len(signed)) // 3
    same = domain[:, None] == domain
    np.fill_diagonal(same, False)
    other = domain[:, None] != domain
    assert similarity[same].mean() > similarity[other].mean() + 0.3
    lengths = np.linalg.norm(table.samples.astype(np.float32), axis=1)
    assert lengths == pytest.approx(np.ones(len(lengths)), abs=2e-3)
    unseen = sorted(set(range(1024)) - set(pieces[~held].flatten().tolist()))
    assert unseen
    assert not table.signatures[unseen].any()


def test_each_expert_of_each_layer_has_a_direction_of_its_own():
    sketches = torch.cat([calibration.make_sketch(16, layer) for layer in range(2)])
    assert (sketches @ sketches.T).numpy() == pytest.approx(np.eye(32), abs=0.35)


def test_a_table_keeps_samples_of_pieces_evenly_taken(monkeypatch):
    monkeypatch.setattr(calibration, "SAMPLES", 3)
    signatures, pieces = 2 * np.eye(5, dtype=np.float16), torch.arange(5).view(5, 1)
    assert calibration._sample(signatures, pieces).tolist() == np.eye(5)[::2].tolist()


def test_a_model_whose_forward_calls_no_experts_is_one_line(tiny_model, pieces, monkeypatch):
    monkeypatch.setattr(calibration, "watch_experts", lambda model: nullcontext([]))
    with refused(f"--model {tiny_model}"):
        calibrate(load_model(tiny_model, "cpu"), tiny_model, pieces[:1])


def test_a_projection_keeps_what_sets_ids_apart():
    """Against numpy's own singular vectors, of the same shrunk and centred means."""
    draw = torch.Generator().manual_seed(1)
    counts = torch.tensor([50.0, 10.0, 0.0, 200.0, 1.0])
    sums = torch.randn(5, 8, generator=draw) * counts[:, None]
    projected = project(sums, counts, 3)
    mean = (sums.sum(0) / counts.sum()).numpy()
    apart = (sums.numpy() - counts.numpy()[:, None] * mean) / (counts.numpy() + SHRINKAGE)[:, None]
    directions = np.linalg.svd(apart * np.sqrt(counts.numpy())[:, None])[2][:3].T
    directions *= np.sign(directions[abs(directions).argmax(0), range(3)])
    assert projected.numpy() == pytest.approx(apart @ directions, abs=1e-4)
    assert not projected[2].any()


def test_the_command_writes_a_table(tiny_model, tmp_path, capsys):
    file = tmp_path / "table.safetensors"
    flags = ["--model", str(tiny_model), "--texts", str(tiny_model / "heldout"), "--out", str(file)]
    assert main(["calibrate", *flags, "--tokens", "256"]) == 0
    table = load_table(file)
    assert (table.signatures.shape[1], len(table.samples)) == (32, 4)
    assert "1024 ids x 32 dimensions" in capsys.readouterr().out


WRONG = [
    ("--model", "/nowhere", "/nowhere/config.json:"),
    ("--texts", "/nowhere", "/nowhere:"),
    ("--out", "/nowhere/file", "/nowhere/file:"),
    ("--out", ".", ".:"),
    ("--out", "/proc/none", "/proc/none:"),
    ("--tokens", "255", "255:"),
    ("--model", DRAFT, f"{DRAFT}: must be a Mixture-of-Experts model"),
]


@pytest.mark.parametrize(("flag", "value", "said"), WRONG)
def test_wrong_arguments_are_one_line(tiny_model, tmp_path, capsys, flag, value, said):
    flags = {"--model": tiny_model, "--texts": tiny_model / "heldout", "--out": tmp_path / "t", flag: value}
    (tmp_path / "t").write_text("kept")
    with pytest.raises(SystemExit) if flag == "--tokens" else nullcontext():
        assert main(["calibrate", *(str(word) for pair in flags.items() for word in pair)]) == 1
    assert f"{flag} {said}" in read_refusal(capsys)
    assert (tmp_path / "t").read_text() == "kept"


def test_experts_may_be_nested_and_a_model_too_large_is_one_line(tiny_model, tmp_path, capsys, monkeypatch):
    """A folder with the nested configuration alone lacks no experts, but a tokenizer. Transformers reads -Infinity."""
    (tmp_path / "config.json").write_text('{"text_config": {"num_experts": 8, "num_experts": 8, "limit": -Infinity}}')
    monkeypatch.setattr(calibration, "load_model", Mock(side_effect=RuntimeError("no memory")))
    for model, line in ((tmp_path, f"--model {tmp_path}: must be a whole checkpoint; no "), (tiny_model, "no memory")):
        flags = ["--model", str(model), "--texts", str(tiny_model / "heldout"), "--out", str(tmp_path / "t")]
        assert main(["calibrate", *flags]) == 1
        assert read_refusal(capsys).startswith(f"calibrate: {line}")


def test_a_checkpoint_without_whole_weights_and_short_texts_are_one_line(tiny_model, tmp_path):
    for file in tiny_model.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with refused(f"--model {tmp_path}"):
        load_model(tmp_path, "cpu")
    (tmp_path / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes()[:100_000])
    with refused(f"--model {tmp_path}"):
        load_model(tmp_path, "cpu")
    (tmp_path / "short.txt").write_text("few words")
    with refused(f"--texts {tmp_path}"):
        read_texts(tmp_path, tiny_model, 256, 1000)
