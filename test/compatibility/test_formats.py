"""The format of a model's experts, as its configuration declares it, and what is known of each."""

from types import SimpleNamespace
from typing import Any

from compatibility.configured import pack
from scripts.runners import FP8, FP8_BLOCKS, FP8_CHANNELS, INT4, MXINT4, NVFP4, NVFP4_COMPRESSED, compress, number
from sglang_xshare.compatibility import formats
from sglang_xshare.compatibility.formats import Format, read_format

INT4_GROUPS = "int4 (compressed-tensors)"
BY_BLOCK, BY_GROUP = "fp8 by block (compressed-tensors)", "fp8 by group (compressed-tensors)"


def make_model(quantization: str | None, declared: dict[str, Any] | None, **others: Any) -> SimpleNamespace:
    """Upstream's `ModelConfig`, as far as it is read."""
    config = SimpleNamespace(quantization_config=declared)
    return SimpleNamespace(quantization=quantization, hf_config=config, hf_text_config=config, **others)


def test_the_experts_of_a_checkpoint():
    for quantization, declared, experts in (
        (None, None, "bf16"),
        ("fp8", FP8_BLOCKS, "fp8 by block"),
        ("fp8", FP8, "fp8 by tensor"),
        ("modelopt_fp4", NVFP4, "NVFP4"),
        ("compressed-tensors", FP8_CHANNELS, "fp8 by channel (compressed-tensors)"),
        ("compressed-tensors", NVFP4_COMPRESSED, "NVFP4 (compressed-tensors)"),
        ("compressed-tensors", INT4, "int4 (compressed-tensors)"),
        ("compressed-tensors", MXINT4, "MXINT4"),
        ("compressed-tensors", {"format": "mxfp4-pack-quantized", "config_groups": {"group_0": {}}}, "MXFP4"),
        ("compressed-tensors", {"config_groups": {}}, "compressed-tensors"),
        ("compressed-tensors", {"config_groups": None}, "compressed-tensors"),
        ("compressed-tensors", pack(num_bits=4, type="float", group_size=32), "MXFP4"),
        ("compressed-tensors", pack(num_bits=4, type="float", group_size=16), "NVFP4 weights"),
        ("compressed-tensors", pack(num_bits=4, type="int", group_size=32), "MXINT4"),
        ("compressed-tensors", pack(num_bits=4, type="int", group_size=32, symmetric=False), INT4_GROUPS),
        ("compressed-tensors", pack(num_bits=4, type="int", group_size=32, dynamic=True), INT4_GROUPS),
        ("compressed-tensors", compress("int", number(4, "int", "group", 32), {"num_bits": 8}), "compressed-tensors"),
        ("compressed-tensors", pack(num_bits=8, type="float", strategy="block"), BY_BLOCK),
        ("compressed-tensors", pack(num_bits=8, type="float", strategy="group"), BY_GROUP),
        ("mxfp8", {"quant_method": "mxfp8"}, "mxfp8"),
        ("w4afp8", {"quant_method": "w4afp8"}, "w4afp8"),
        ("awq_marlin", {"quant_method": "awq"}, "awq_marlin"),
    ):
        assert (declared, str(read_format(make_model(quantization, declared), None))) == (declared, experts)


def test_experts_that_resolution_found_or_that_a_text_model_declares():
    assert read_format(make_model(None, None), "fp8") is formats.FP8_TENSOR
    assert read_format(make_model("fp8", FP8_BLOCKS, is_fp4_experts=True), None) is formats.MXFP4_IN_FP8
    model = make_model("compressed-tensors", None)
    model.hf_text_config = SimpleNamespace(quantization_config=SimpleNamespace(to_dict=lambda: MXINT4))
    assert read_format(model, None) is formats.MXINT4
    model.hf_config = SimpleNamespace(compression_config=INT4)
    model.hf_text_config = SimpleNamespace()
    assert read_format(model, None) is formats.INT4


def list_formats() -> list[Format]:
    """Every format that something is known of."""
    held = [list(value.values()) if isinstance(value, dict) else [value] for value in vars(formats).values()]
    return list({value: None for values in held for value in values if isinstance(value, Format)})


def test_every_fitting_runner_is_one_of_sglangs():
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

    named = {runner for form in list_formats() for runner in (*form.fitting, *form.unserved, form.blackwell)}
    assert named <= {backend.value for backend in MoeRunnerBackend}
