"""The checkpoints without weights: upstream reads them, and text and tokens are the same thing in them."""

import json
import subprocess
import sys

import pytest
from tokenizers import Tokenizer

from benchmark.common.paths import ROOT
from benchmark.common.rounds import write_prompts
from benchmark.common.variant import parse_variant
from benchmark.gpu import eagle3, replay, server
from benchmark.gpu.models import write_model, write_texts
from benchmark.gpu.serving import INPUT_TOKENS, SERVER_ARGS, runner_args

# Reads each model's configuration and parses each command line as upstream's launcher does, resolving nothing.
READ = """
import argparse, json, sys
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs
from sglang_xshare.compatibility.moe_model import read_model

asked = json.load(sys.stdin)
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
for command in asked["commands"]:
    parser.parse_args(command)
for name in asked["environment"]:
    getattr(envs, name)
models = {}
for path in asked["models"]:
    config = ModelConfig(model_path=path)
    model = None if path.endswith("eagle3") else read_model(config, path)
    experts = [model.num_experts, model.top_k] if model else [0, 0]
    models[path.rsplit("/", 1)[-1]] = [config.num_hidden_layers, config.vocab_size, *experts]
print(json.dumps(models))
"""


READ_AS = {
    "qwen3-30b-a3b": [48, 151936, 128, 8],
    "qwen3-30b-a3b-12-layers": [12, 151936, 128, 8],
    "gpt-oss-120b": [36, 201088, 128, 4],
    "gpt-oss-20b": [24, 201088, 32, 4],
    "gpt-oss-120b-eagle3": [1, 201088, 0, 0],
}
"""[layers, vocabulary, experts, top-k] of every model that is served."""


def commands() -> list[list[str]]:
    """Every command line that an experiment would start a server with."""
    served = [
        *((case.model, parse_variant(case.policy), ()) for case in server.CASES.values()),
        (eagle3.MODEL, parse_variant(eagle3.POLICY), eagle3.CASE.args()),
        *((replay.MODEL, variant, ()) for variant in (*replay.LIVE.values(), *replay.MASKING)),
    ]
    flags = ["--model-path", "m", "--enable-metrics"]
    return [[*flags, *variant.server_args(), *runner_args(name), *SERVER_ARGS, *args] for name, variant, args in served]


@pytest.mark.parametrize("version", ["0.5.17", pytest.param("0.5.23", marks=pytest.mark.long)])
def test_upstream_reads_every_model_and_every_flag(tmp_path, patched_release, version):
    models = [str(write_model(name, tmp_path)) for name in READ_AS]
    asked = {"models": models, "commands": commands(), "environment": list(eagle3.ENV)}
    path = f"{patched_release(version)}:{ROOT / 'python'}"
    env = {"PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", READ]
    done = subprocess.run(command, input=json.dumps(asked), env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == READ_AS


def test_prompts_are_random_tokens_of_the_length_asked_for(tmp_path):
    name = "qwen3-30b-a3b"
    model, texts = write_model(name, tmp_path), write_texts(name, INPUT_TOKENS, tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    write_prompts(prompts, texts, model, 64, INPUT_TOKENS, seed=0)
    encode = Tokenizer.from_file(str(model / "tokenizer.json"))
    asked = [json.loads(line)["conversations"][0]["value"] for line in prompts.read_text().splitlines()]
    ids = [encode.encode(text).ids for text in asked]
    assert [len(row) for row in ids] == [INPUT_TOKENS] * 64
    assert len({token for row in ids for token in row}) > 60 * INPUT_TOKENS  # spread over the vocabulary
    assert encode.decode([7, 151935]) == "t7 t151935"
