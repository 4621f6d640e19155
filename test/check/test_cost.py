"""What `check` imports, and the processor time that it takes, when SGLang does not resolve the server's arguments."""

import json
import os
import subprocess
import sys

import pytest

from benchmark.common.paths import ROOT
from benchmark.gpu.models import COMMON
from check.asking import QWEN, TINY, say_without
from check.published import read_shape
from sglang_xshare.check.modules import COMPILER, IMAGES

SECONDS = 3.0


def run(*asked):
    """Run the command in a process without SGLang. Returns (its modules, its seconds of processor time)."""
    said = say_without("sglang", *asked)
    assert "weights" in said.out, said.err
    told = "check: not answered: whether it would be served: it needs sglang, which is not installed here"
    assert said.err == [told], "and nothing of what was imported"
    return said.modules, said.seconds


CASES = {"Qwen3-MoE": ("--batch", "16", "--compare", "oea:k0=3"), "Qwen3-Next": ()}


@pytest.mark.parametrize("name", CASES)
def test_it_imports_what_a_report_needs(name, write):
    asked = ("--model", str(write(COMMON | read_shape(name))), "--gpu", "h100", *CASES[name])
    modules, _ = run(*asked)
    heavy = {name for name in modules if name.partition(".")[0] in ("sglang", "triton", IMAGES)}
    assert heavy | {name for name in modules if name.startswith(COMPILER)} == set()


@pytest.mark.long  # processor time too grows on a busy machine: 3.03 s were seen beside a server
@pytest.mark.parametrize("name", CASES)
def test_it_takes_less_processor_time_than_asked(name, write):
    asked = ("--model", str(write(COMMON | read_shape(name))), "--gpu", "h100", *CASES[name])
    assert min(run(*asked)[1] for _ in range(3)) < SECONDS


def test_a_checkpoint_is_counted_without_torch():
    modules, _ = run("--model", str(TINY), "--gpu", "h100")
    assert {"torch", "transformers", "numpy"}.isdisjoint(modules)


SAFE = """
import json, sys
import torch
from sglang_xshare.check.modules import import_lightly, list_modules
config = json.loads(sys.argv[1])
with import_lightly():
    counted = sum(tensor.count for tensor in list_modules(config, {})[0])
from transformers import Qwen3MoeForCausalLM
model = Qwen3MoeForCausalLM(Qwen3MoeForCausalLM.config_class.from_dict(config))
assert sum(parameter.numel() for parameter in model.parameters()) == counted
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
print(model(torch.zeros(1, 3, dtype=torch.long)).logits.shape)
"""


def test_whoever_imports_transformers_later_gets_all_of_it():
    small = {"hidden_size": 32, "intermediate_size": 16, "moe_intermediate_size": 16, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 32, "num_experts": 8}
    env = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    asked = [sys.executable, "-c", SAFE, json.dumps(QWEN | small)]
    done = subprocess.run(asked, env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "torch.Size([1, 3, 32])\n", done.stderr
