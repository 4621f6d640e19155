"""`sglang-xshare prune`: the checkpoint answers as the static ranking does, and one line for whatever goes wrong."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from benchmark.quality.model import load_model
from prune.static import EXPERTS, LAYERS, draw_orders, generate, static, write_orders
from sglang_xshare.cli import main
from sglang_xshare.prune.checkpoint import ORDERS, rename
from sglang_xshare.prune.source import INDEX

TOP_K = 8
PROMPTS = ["def f(x):\n    return", "the king said to"]
NEW_TOKENS = 6


def prune(model: Path, out: Path, *words: object) -> int:
    return main(["prune", "--model", str(model), "--out", str(out), *map(str, words)])


@pytest.mark.parametrize("keep", [TOP_K, 24])
def test_it_answers_as_the_static_ranking(keep, tiny_model, tmp_path):
    orders = draw_orders()
    assert prune(tiny_model, tmp_path / "out", "--order", write_orders(tmp_path / "o", orders), "--keep", keep) == 0
    whole, pruned = load_model(tiny_model), load_model(tmp_path / "out")
    assert pruned.config.num_experts == keep
    vanilla = generate(whole, tiny_model, PROMPTS, NEW_TOKENS)[0]
    with static(whole, orders, keep):
        answers, logits = generate(whole, tiny_model, PROMPTS, NEW_TOKENS)
    found, same = generate(pruned, tiny_model, PROMPTS, NEW_TOKENS)
    assert found == answers != vanilla
    torch.testing.assert_close(same, logits, rtol=1e-4, atol=1e-4)


def test_all_but_the_lost_experts_is_there(tiny_model, tmp_path, capsys):
    orders = draw_orders(1)
    assert prune(tiny_model, tmp_path / "out", "--order", write_orders(tmp_path / "o", orders), "--keep", 16) == 0
    assert "16 of 64 experts in 4 layers" in capsys.readouterr().out
    before, after = load_file(tiny_model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert len(before) - len(after) == LAYERS * (EXPERTS - 16) * 3
    for layer, order in enumerate(orders):
        block = f"model.layers.{layer}.mlp."
        kept = sorted(order[:16])
        assert torch.equal(after[f"{block}gate.weight"], before[f"{block}gate.weight"][kept])
        for new, old in enumerate(kept):
            name = "experts.{}.down_proj.weight"
            assert torch.equal(after[block + name.format(new)], before[block + name.format(old)])
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    own = {"config.json", "model.safetensors", ORDERS}
    copied = {file.relative_to(tiny_model) for file in tiny_model.rglob("*") if file.is_file()}
    assert {file.relative_to(tmp_path / "out") for file in (tmp_path / "out").rglob("*") if file.is_file()} == {
        *copied,
        Path(ORDERS),
    }
    for file in copied:
        if str(file) not in own:
            assert (tmp_path / "out" / file).read_bytes() == (tiny_model / file).read_bytes()
    changed = json.loads((tiny_model / "config.json").read_text()) | {"num_experts": 16}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == changed
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_its_orders_are_those_of_the_policy(tiny_model, tmp_path, capsys):
    """What it leaves beside the weights is a configuration for the whole model, and an --order."""
    orders = draw_orders(2)
    assert prune(tiny_model, tmp_path / "one", "--order", write_orders(tmp_path / "o", orders), "--keep", 20) == 0
    config = tmp_path / "one" / ORDERS
    keys = json.loads(config.read_text())
    assert (keys["budget"], keys["ranking"], keys["order"]) == (20, "static", orders[0])
    shown = ["policies", "--show", "moe-spec", str(config), "--model", str(tiny_model), "--batch", "16"]
    assert main(shown) == 0
    assert prune(tiny_model, tmp_path / "two", "--order", config, "--keep", 12) == 0
    assert json.loads((tmp_path / "two" / ORDERS).read_text()) == keys | {"budget": 12}


def test_a_list_is_every_layers_order(tiny_model, tmp_path):
    (tmp_path / "list").write_text(json.dumps(list(range(EXPERTS))[::-1]))
    assert prune(tiny_model, tmp_path / "out", "--order", tmp_path / "list", "--keep", 8) == 0
    gates = [name for name in load_file(tmp_path / "out" / "model.safetensors") if name.endswith("gate.weight")]
    before, after = load_file(tiny_model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert len(gates) == LAYERS
    assert all(torch.equal(after[gate], before[gate][-8:]) for gate in gates)


def test_texts_are_counted(tiny_model, tmp_path, capsys):
    words = ("--texts", tiny_model / "heldout", "--tokens", 128, "--length", 64, "--keep", 32)
    assert prune(tiny_model, tmp_path / "out", *words) == 0
    keys = json.loads((tmp_path / "out" / ORDERS).read_text())
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    files = sorted((tiny_model / "heldout").glob("*.txt"))
    ids = [tokenizer(file.read_text())["input_ids"][:128] for file in files]
    model = load_model(tiny_model)
    counts = torch.zeros(EXPERTS, dtype=torch.int64)

    def count(gate: Any, args: Any, output: Any) -> None:
        counts.add_(output[2].flatten().bincount(minlength=EXPERTS))

    model.model.layers[0].mlp.gate.register_forward_hook(count)
    with torch.inference_mode():
        model(torch.tensor(ids).view(-1, 64))
    ranked = counts[torch.tensor(keys["order"])]
    assert (ranked[:-1] >= ranked[1:]).all()
    assert counts.sum() == len(files) * 128 * TOP_K


@pytest.fixture
def sharded(tiny_model: Path, tmp_path: Path) -> Path:
    """The small checkpoint in two files, as large ones are."""
    folder = tmp_path / "sharded"
    shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("*.safetensors", "heldout"))
    tensors = sorted(load_file(tiny_model / "model.safetensors").items())
    halves = {f"model-0000{part + 1}-of-00002.safetensors": dict(tensors[part::2]) for part in range(2)}
    for name, half in halves.items():
        save_file(half, folder / name, metadata={"format": "pt"})
    places = {name: file for file, half in halves.items() for name in half}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    (folder / "consolidated.safetensors").write_bytes(b"all experts")
    return folder


def test_files_and_their_index(sharded, tiny_model, tmp_path):
    orders = write_orders(tmp_path / "o", draw_orders())
    assert prune(sharded, tmp_path / "one", "--order", orders, "--keep", 16) == 0
    assert prune(tiny_model, tmp_path / "two", "--order", orders, "--keep", 16) == 0
    index = json.loads((tmp_path / "one" / INDEX).read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "one" / file, framework="pt") as shard:
            found[name] = shard.get_tensor(name)
    wanted = load_file(tmp_path / "two" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    assert not (tmp_path / "one" / "consolidated.safetensors").exists()


def test_what_ends_halfway_leaves_nothing(sharded, tmp_path, capsys, monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    (tmp_path / "list").write_text(json.dumps(list(range(EXPERTS))))
    assert prune(sharded, tmp_path / "out", "--order", tmp_path / "list", "--keep", 8) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["list", "sharded"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--keep", "7"], "--keep 7: allowed is 8, the model's top-k, to 63"),
        (["--keep", "64"], "--keep 64: allowed is 8"),
        (["--order", "missing"], "--order missing: No such file or directory; allowed is a JSON file"),
        (["--order", "bad"], "--order bad: malformed JSON"),
        (["--order", "text"], "--order text: a JSON str; allowed is a list, or keys of moe-spec"),
        (["--order", "short"], "--order short: order of 63 experts: allowed is all 64 experts once"),
        (["--order", "twice"], "--order twice: order = [0, 0, 1]: allowed is a list of all expert ids, each once"),
        (["--order", "layers"], "--order layers: ranking = 'static': allowed only with order"),
        (["--order", "vanilla"], "--order vanilla: layer 1: allowed is an order, with coverage substitute"),
        (["--order", "truncate"], "--order truncate: layer 0: allowed is an order, with coverage substitute"),
        (["--model", "missing"], "--model missing: config.json: No such file or directory"),
        (["--model", "empty"], "--model empty: no *.safetensors; allowed is a checkpoint in that format"),
        (["--model", "cut"], "--model cut: model.safetensors: "),
        (["--out", "full"], "--out full: something is there; allowed is a folder that is empty or not there yet"),
        (["--out", "nowhere/out"], "--out nowhere/out: no folder nowhere; allowed is a folder in one"),
        (["--out", "cut/out", "--model", "cut"], "--model cut: model.safetensors: "),
        (["--length", "0"], "--length 0: allowed is a whole number above 0"),
    ],
)
def test_what_goes_wrong_is_one_line(words, line, tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    everyone = list(range(EXPERTS))
    contents: dict[str, Any] = {
        "good": everyone,
        "text": "order",
        "short": everyone[:-1],
        "twice": [0, 0, 1],
        "layers": {"layers": {"0": {"order": everyone}}},
        "vanilla": {"order": everyone, "layers": {"1": {"policy": "vanilla"}}},
        "truncate": {"order": everyone, "coverage": "truncate"},
    }
    for name, content in contents.items():
        Path(name).write_text(json.dumps(content))
    Path("bad").write_text("{")
    for name in ("empty", "cut", "full"):
        Path(name).mkdir()
        shutil.copy(tiny_model / "config.json", name)
    Path("cut", "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes()[:100_000])
    given = {"--model": str(tiny_model), "--order": "good", "--keep": "8", "--out": "out"}
    given |= dict(zip(words[::2], words[1::2], strict=True))
    before = sorted(os.listdir())
    assert main(["prune", *(word for pair in given.items() for word in pair)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"prune: {line}")
    assert err.count("\n") == 1
    assert sorted(os.listdir()) == before


def test_a_folder_inside_the_model_is_refused(sharded, tmp_path, capsys):
    (tmp_path / "list").write_text(json.dumps(list(range(EXPERTS))))
    assert prune(sharded, sharded / "out", "--order", tmp_path / "list", "--keep", 8) == 1
    assert "inside --model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "model.layers.3.mlp.experts.5.w1.weight_scale_inv",
            ("model.layers.3.mlp.experts.1.w1.weight_scale_inv", None),
        ),
        ("model.layers.3.mlp.experts.4.w1.weight", (None, None)),
        (
            "model.layers.3.mlp.gate.e_score_correction_bias",
            ("model.layers.3.mlp.gate.e_score_correction_bias", [2, 5]),
        ),
        ("model.layers.3.mlp.shared_expert_gate.weight", ("model.layers.3.mlp.shared_expert_gate.weight", None)),
        ("model.layers.2.mlp.gate_proj.weight", ("model.layers.2.mlp.gate_proj.weight", None)),
        ("model.layers.3.mlp.gate.weight", ("model.layers.3.mlp.gate.weight", [2, 5])),
    ],
)
def test_names(name, wanted):
    assert rename(name, {"model.layers.3.mlp.": [2, 5]}) == wanted


def test_an_interrupt_leaves_nothing(tiny_model, tmp_path, monkeypatch, capsys):
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", interrupt)
    (tmp_path / "list").write_text(json.dumps(list(range(EXPERTS))))
    assert prune(tiny_model, tmp_path / "out", "--order", tmp_path / "list", "--keep", 8) == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["list"]
