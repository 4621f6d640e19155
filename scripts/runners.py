"""Write the table of MoE runners in docs/limits.md. It shows the runner that serves a policy on each model and GPU.

python -m scripts.runners           write the table
python -m scripts.runners --check   check that the table is up to date
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmark.gpu.models import COMMON, CONFIGS
from scripts.compatibility import replace_table, write_page

PAGE = Path(__file__).resolve().parents[1] / "docs/limits.md"
BEGIN = "<!-- made by python -m scripts.runners -->\n"

COLUMNS = {
    "H100, H200": "h100",
    "B200, B300": "b200",
    "RTX 5090, RTX PRO 6000": "rtx5090",
    "MI300X with `SGLANG_USE_AITER=1`": "mi300x",
}
"""The column headings, and the name of each column's GPU in `sglang_xshare.gpus`."""
MOVED = "expert policy: MoE runner "

QWEN3, GPT_OSS = COMMON | CONFIGS["qwen3-30b-a3b"], COMMON | CONFIGS["gpt-oss-20b"]
SMALL = COMMON | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
}
DEEPSEEK = SMALL | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 32,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
}
DEEPSEEK_V4 = DEEPSEEK | {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_experts_per_tok": 6,
    "num_key_value_heads": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "scoring_func": "sqrtsoftplus",
    "qk_nope_head_dim": 448,
    "num_hash_layers": 1,
    "compress_ratios": [0, 0, 4, 128],
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "sliding_window": 128,
}
KIMI = DEEPSEEK | {"n_routed_experts": 384, "n_group": 1, "topk_group": 1}
GLM = SMALL | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "head_dim": 128,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
}
MINIMAX = SMALL | {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "head_dim": 128,
    "num_local_experts": 256,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": False,
    "hidden_act": "silu",
}
MIXTRAL = SMALL | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
}

FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
MODELOPT_FP8: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "kv_cache_quant_algo": None,
    "exclude_modules": [],
}
NVFP4 = MODELOPT_FP8 | {"quant_algo": "NVFP4", "group_size": 16}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def compress(form: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    """Return the quantization config of a compressed-tensors checkpoint."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}


def number(bits: int, kind: str, strategy: str, group_size: int | None = None, dynamic: Any = False) -> dict[str, Any]:
    """Return the description of a number format in a compressed-tensors config."""
    size = {} if group_size is None else {"group_size": group_size}
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": dynamic} | size


FP8_CHANNELS = compress("float-quantized", number(8, "float", "channel"), number(8, "float", "token", dynamic=True))
NVFP4_COMPRESSED = compress(
    "nvfp4-pack-quantized",
    number(4, "float", "tensor_group", 16),
    number(4, "float", "tensor_group", 16, dynamic="local"),
)
INT4 = compress("pack-quantized", number(4, "int", "group", 128), None)
MXINT4 = compress("pack-quantized", number(4, "int", "group", 32), None)

ROWS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "Qwen3-MoE bf16": (QWEN3, None),
    "Qwen3-MoE fp8, by block": (QWEN3, FP8_BLOCKS),
    "Qwen3-MoE fp8, by tensor": (QWEN3, FP8),
    "Qwen3-MoE fp8, by channel (compressed-tensors)": (QWEN3, FP8_CHANNELS),
    "Qwen3-MoE fp8, by tensor (modelopt)": (QWEN3, MODELOPT_FP8),
    "Qwen3-MoE NVFP4 (modelopt)": (QWEN3, NVFP4),
    "Qwen3-MoE NVFP4 (compressed-tensors)": (QWEN3, NVFP4_COMPRESSED),
    "Qwen3-MoE AWQ": (QWEN3 | {"dtype": "float16"}, AWQ),
    "Qwen3-MoE GPTQ": (QWEN3 | {"dtype": "float16"}, GPTQ),
    "Qwen3-MoE int4 (compressed-tensors)": (QWEN3, INT4),
    "Qwen3-MoE w8a8-int8": (QWEN3, {"quant_method": "w8a8_int8"}),
    "Mixtral bf16": (MIXTRAL, None),
    "Mixtral NVFP4 (modelopt)": (MIXTRAL, NVFP4),
    "DeepSeek-V3 fp8, by block": (DEEPSEEK, FP8_BLOCKS),
    "DeepSeek-V3 NVFP4 (modelopt)": (DEEPSEEK, NVFP4),
    "DeepSeek-V4 fp8 by block, experts MXFP4": (DEEPSEEK_V4, FP8_BLOCKS | {"routed_experts_quant_method": "mxfp4"}),
    "Kimi-K2 int4 (compressed-tensors, groups of 32)": (KIMI, MXINT4),
    "GLM-4.6 bf16": (GLM, None),
    "GLM-4.6 fp8, by channel (compressed-tensors)": (GLM, FP8_CHANNELS),
    "MiniMax-M2 fp8, by block": (MINIMAX, FP8_BLOCKS),
    "gpt-oss MXFP4": (GPT_OSS, GPT_OSS["quantization_config"]),
    "gpt-oss bf16": ({key: value for key, value in GPT_OSS.items() if key != "quantization_config"}, None),
}
"""The config.json and the quantization config of each model, by name. All sizes that matter here are realistic."""


def make_table() -> str:
    """Return the Markdown table for the installed SGLang, which must be patched."""
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        models = [write_model(Path(folder) / str(row), *model) for row, model in enumerate(ROWS.values())]
        columns = [resolve_column(models, gpu) for gpu in COLUMNS.values()]
    rows = [["model", *COLUMNS], ["---"] * (1 + len(COLUMNS)), *zip(ROWS, *columns, strict=True)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def write_model(folder: Path, config: dict[str, Any], quantization: dict[str, Any] | None) -> Path:
    """Write a model folder without weights, and return the folder."""
    folder.mkdir()
    declared = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config | declared))
    return folder


def resolve_column(models: list[Path], gpu_name: str) -> list[str]:
    """Return the table cells of one GPU, one cell for each model."""
    from sglang_xshare.check.pretend import pretend
    from sglang_xshare.check.resolve import resolve
    from sglang_xshare.gpus import GPUS

    gpu = GPUS[gpu_name]
    os.environ["SGLANG_USE_AITER"] = "1" if gpu.capability is None else "0"
    flags = ["--device", "cuda", "--expert-policy", "xshare"]
    with pretend(gpu):
        return [describe(resolve(["--model", str(model), *flags], None)) for model in models]


def describe(resolution: Any) -> str:
    """Return the text of one cell.

    It contains the MoE runner that SGLang chooses. If the policy needs another runner, the cell shows both. If the
    server would refuse to start, the cell says so.
    """
    from sglang_xshare.compatibility.experts import read_experts
    from sglang_xshare.upstream.server import spell

    for who, _ in resolution.refusals:
        experts = None if who == "SGLang" else read_experts(resolution.start.server_args)
        return f"refused: {experts.runner}" if experts else "not in SGLang"
    for _, line in resolution.warnings:
        if line.startswith(MOVED):
            return line.removeprefix(MOVED).replace(" (auto) -> ", " → ")
    return spell(resolution.start.config.moe_runner_backend)


if __name__ == "__main__":
    write_page(PAGE, lambda: replace_table(PAGE.read_text(), make_table(), BEGIN), "python -m scripts.runners", __doc__)
