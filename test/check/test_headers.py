"""Weights as the headers of a checkpoint's safetensors list them: no tensor is read."""

import json
import struct
from dataclasses import replace
from math import prod

import pytest

from check.asking import QWEN, TINY
from sglang_xshare.check.reading import read_flagged
from sglang_xshare.check.server import read_flags
from sglang_xshare.check.tensors import read_headers
from sglang_xshare.check.weights import count_weights, read_weights

TWO_LAYERS = QWEN | {"num_hidden_layers": 2}
SIZES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1, "I32": 4, "I64": 8}


def write_headers(folder, tensors, file="model.safetensors"):
    """Write a safetensors file that ends after its header, {name: (dtype, shape)}, into the folder."""
    header, begin = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in tensors.items():
        end = begin + prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    (folder / file).write_bytes(struct.pack("<Q", len(text)) + text)
    return folder


def list_qwen(layers=2, dtype="BF16"):
    """The tensors of Qwen3-30B-A3B's first layers, as it is published: a matrix each."""
    tensors = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), ("BF16", (151936, 2048)))
    tensors["model.norm.weight"] = ("BF16", (2048,))
    for layer in range(layers):
        start = f"model.layers.{layer}"
        for name, rows in (("q_proj", 4096), ("k_proj", 512), ("v_proj", 512)):
            tensors[f"{start}.self_attn.{name}.weight"] = (dtype, (rows, 2048))
        tensors[f"{start}.self_attn.o_proj.weight"] = (dtype, (2048, 4096))
        tensors |= {f"{start}.self_attn.{name}_norm.weight": ("BF16", (128,)) for name in "qk"}
        tensors |= {f"{start}.{name}_layernorm.weight": ("BF16", (2048,)) for name in ("input", "post_attention")}
        tensors[f"{start}.mlp.gate.weight"] = ("BF16", (128, 2048))
        for expert in range(128):
            for name, shape in (("gate_proj", (768, 2048)), ("up_proj", (768, 2048)), ("down_proj", (2048, 768))):
                tensors[f"{start}.mlp.experts.{expert}.{name}.weight"] = (dtype, shape)
    return tensors


def test_headers_and_modules_count_the_same(write):
    modules = read_weights(write(TWO_LAYERS))
    headers = read_weights(write_headers(write(TWO_LAYERS), list_qwen()))
    assert (modules.source, headers.source) == ("transformers", "safetensors")
    for name in ("moe_layers", "expert", "dense", "held", "cache", "cache_heads"):
        assert getattr(headers, name) == getattr(modules, name), name


def test_the_shipped_checkpoint_is_counted_by_its_own_bytes():
    weights = read_weights(TINY)
    experts = weights.moe_layers * weights.model.num_experts * weights.expert
    stored = sum(tensor.count * 2 for tensor in read_headers(TINY))
    assert experts + weights.held == stored


def test_bytes_of_a_quantized_checkpoint_are_those_stored(write):
    """Whatever the quantization is called: matrices of a byte, scales, all else in bfloat16."""
    tensors = list_qwen(dtype="F8_E4M3")
    scaled = [name for name, (dtype, _) in tensors.items() if dtype == "F8_E4M3"]
    tensors |= {f"{name}_scale_inv": ("F32", (6, 16)) for name in scaled}
    unknown = TWO_LAYERS | {"quantization_config": {"quant_method": "unheard-of"}}
    weights = read_weights(write_headers(write(unknown), tensors))
    held = sum(prod(shape) * SIZES[dtype] for name, (dtype, shape) in tensors.items() if ".experts." not in name)
    assert (weights.expert, weights.bits, weights.held) == (3 * (2048 * 768 + 6 * 16 * 4), None, held)


def test_stored_mxfp4_experts_that_a_server_converts_are_counted_in_bf16(write):
    tensors = list_qwen()
    for name, (_, (rows, columns)) in [item for item in tensors.items() if ".experts." in item[0]]:
        del tensors[name]
        tensors |= {f"{name}_packed": ("U8", (rows, columns // 2)), f"{name}_scale": ("U8", (rows, columns // 32))}
    reading = read_flagged(write_headers(write(TWO_LAYERS), tensors), read_flags([]))
    stored, converted = (count_weights(replace(reading, converts=converts)) for converts in (False, True))
    assert (stored.bits, stored.expert) == (None, 3 * 2048 * 768 * 4.25 / 8)
    assert (converted.bits, converted.expert, converted.held) == (16, 3 * 2048 * 768 * 2, stored.held)


@pytest.mark.parametrize("flags", [[], ["--quantization", "fp8"], ["--dtype", "float16"]])
def test_a_flag_quantizes_no_quantized_checkpoint_again(flags, write):
    """ModelOpt declares its quantization in a file of its own, and leaves some matrices in bfloat16."""
    experts = {name: ("F8_E4M3", shape) for name, (_, shape) in list_qwen().items() if ".experts." in name}
    weights = read_weights(write_headers(write(TWO_LAYERS), list_qwen() | experts), read_flags(flags))
    assert weights.expert == 3 * 2048 * 768
    assert weights.held == sum(prod(shape) * 2 for name, (_, shape) in list_qwen().items() if ".experts." not in name)


def test_flags_change_what_is_not_stored_as_it_is_served(write):
    positions = {"visual.position_ids": ("I64", (1, 729))}  # as encoders of images have them
    folder = write_headers(write(TWO_LAYERS), list_qwen() | positions)
    plain = read_weights(folder)
    assert read_weights(folder, read_flags(["--dtype", "float32"])).expert == 2 * plain.expert
    assert read_weights(folder, read_flags(["--quantization", "fp8"])).expert == plain.expert / 2
    one = read_weights(folder, read_flags(["--json-model-override-args", '{"num_hidden_layers": 1}']))
    assert (one.moe_layers, one.cache) == (1, plain.cache / 2)
    assert read_weights(folder, read_flags(["--load-format", "dummy"])).source == "transformers"


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", struct.pack("<Q", 9) + b"{"])
def test_a_file_that_is_no_safetensors_leaves_the_count_to_modules(content, write):
    folder = write(QWEN)
    (folder / "model.safetensors").write_bytes(content)
    assert read_weights(folder).source == "transformers"


def test_an_index_with_a_missing_file_leaves_the_count_to_modules(write):
    folder = write(TWO_LAYERS)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "a.safetensors", "x": "b.safetensors"}}))
    write_headers(folder, list_qwen(), "a.safetensors")
    assert read_weights(folder).source == "transformers"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "a.safetensors"}}))
    (folder / "consolidated.safetensors").write_bytes(b"not in the index")
    assert read_weights(folder).source == "safetensors"
    index.unlink()
    assert read_weights(folder).source == "safetensors", "Mistral's second copy is left out"


@pytest.mark.parametrize("tensors", [{"model.layers.0.mlp.up_proj.weight": ("BF16", (8, 8))}, list_qwen(0)])
def test_a_checkpoint_whose_names_tell_no_experts_is_not_guessed(tensors, write):
    with pytest.raises(ValueError, match="none of the model's tensors is an expert's"):
        read_weights(write_headers(write(QWEN), tensors))
