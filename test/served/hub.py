"""The families that real servers execute in tests, as they are on the Hugging Face hub: rows of docs/limits.md."""

from dataclasses import dataclass

START = "sglang serve --model-path {} --expert-policy xshare --enable-metrics"


@dataclass(frozen=True)
class OnHub:
    """A family: models by name, each with what its start takes beside our flags."""

    models: tuple[str, ...]
    without: str = ""
    """What of the published models the tests' tiny one lacks, or has another in the place of."""

    def list_starts(self) -> list[str]:
        """A start command for each model."""
        return [START.format(model) for model in self.models]


def on_hub(*models: str, without: str = "") -> OnHub:
    """An entry of `ON_HUB`."""
    return OnHub(models, without)


LINEAR = "its own linear attention: this project's `sgl-kernel` stands in"
ON_HUB = {
    "Cohere 2 MoE": on_hub("CohereLabs/BLS-Mini-Code-1.0"),
    "DeepSeek-V2": on_hub("deepseek-ai/DeepSeek-V2-Lite-Chat"),
    "DeepSeek-V3": on_hub("deepseek-ai/DeepSeek-V3 --tp 8", "moonshotai/Kimi-K2-Instruct --tp 16 --trust-remote-code"),
    "DeepSeek-V4": on_hub("deepseek-ai/DeepSeek-V4-Flash --tp 4"),
    "ERNIE 4.5": on_hub("baidu/ERNIE-4.5-21B-A3B-PT"),
    "EXAONE-MoE": on_hub("LGAI-EXAONE/K-EXAONE-236B-A23B --tp 8", without="its window"),
    "Gemma 4": on_hub(
        "google/gemma-4-26B-A4B-it",
        without="its window, and images: the model on the hub is `Gemma4ForConditionalGeneration`, which is tried",
    ),
    "GLM-4-MoE": on_hub("zai-org/GLM-4.6 --tp 8"),
    "GLM-4.7-Flash": on_hub("zai-org/GLM-4.7-Flash"),
    "GLM-5.2": on_hub(
        "zai-org/GLM-5.2 --tp 16", without="its indexer, which is of CUDA and chooses all of a short text"
    ),
    "gpt-oss": on_hub("openai/gpt-oss-120b"),
    "Granite 4": on_hub("ibm-granite/granite-4.0-h-small", without="its Mamba layers"),
    "Granite-MoE": on_hub("ibm-granite/granite-3.1-3b-a800m-instruct"),
    "Granite-MoE shared": on_hub("ibm-research/moe-7b-1b-active-shared-experts"),
    "HunYuan v1": on_hub("tencent/Hunyuan-A13B-Instruct --tp 4", without="its query and key norms"),
    "HunYuan v3": on_hub("tencent/Hy3 --tp 8"),
    "Kimi K2.5": on_hub("moonshotai/Kimi-K2.5 --tp 8 --trust-remote-code", without="images"),
    "Kimi K3": on_hub(
        "moonshotai/Kimi-K3 --tp 16 --trust-remote-code",
        without="images: the model on the hub is `KimiK3ForConditionalGeneration`, which is tried; weights that are "
        "merged as they load",
    ),
    "Laguna": on_hub("poolside/Laguna-XS.2"),
    "Mellum": on_hub("JetBrains/Mellum2-12B-A2.5B-Instruct"),
    "MiniMax-M2": on_hub("MiniMaxAI/MiniMax-M2 --tp 4 --trust-remote-code", without="its query and key norms"),
    "MiniMax-M3": on_hub(
        "MiniMaxAI/MiniMax-M3 --tp 8",
        without="images: the model on the hub is `MiniMaxM3SparseForConditionalGeneration`, which is tried",
    ),
    "Mixtral": on_hub("mistralai/Mixtral-8x7B-Instruct-v0.1 --tp 2"),
    "Nemotron 3": on_hub(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        without="what its layers lack on a CPU: `test/served/layers.py` stands in",
    ),
    "OLMoE": on_hub("allenai/OLMoE-1B-7B-0924-Instruct"),
    "Qwen2-MoE": on_hub("Qwen/Qwen1.5-MoE-A2.7B-Chat"),
    "Qwen3-MoE": on_hub("Qwen/Qwen3-235B-A22B --tp 8"),
    "Qwen3-Next": on_hub("Qwen/Qwen3-Next-80B-A3B-Instruct --tp 4", without=LINEAR),
    "Qwen3.5-MoE": on_hub("Qwen/Qwen3.5-35B-A3B --tp 2", without=f"images; {LINEAR}"),
    "Qwen3.8-Flash-Next": on_hub(
        "Qwen/Qwen3.8-Flash-Next --tp 8", without=f"images; its sparse attention's indexer, which is of CUDA; {LINEAR}"
    ),
    "Step-3.5": on_hub("stepfun-ai/Step-3.5-Flash --tp 4 --trust-remote-code"),
}
"""By name: each has a tiny model in `family_table.py`, `hybrids.py`, `gemma.py`, `recent.py` or
`test/fake_gpu/gpu_models.py`.
"""
