"""The families that real servers execute in tests, as they are on the Hugging Face hub: rows of docs/limits.md."""

START = "sglang serve --model-path {} --expert-policy xshare --enable-metrics"


class OnHub:
    """A family: models by name, each with what its start takes beside our flags. `untested` is the class of the
    published models if it is not the class that tests execute. `without` is what of the published models the tests'
    tiny one lacks, or has another in the place of.
    """

    def __init__(self, *models: str, untested: str = "", without: str = "") -> None:
        self.models, self.untested, self.without = models, untested, without

    def list_starts(self) -> list[str]:
        """A start command for each model."""
        return [START.format(model) for model in self.models]


LINEAR = "its linear attention's kernels: this project's `sgl-kernel` computes them"
ON_HUB = {
    "Cohere 2 MoE": OnHub("CohereLabs/BLS-Mini-Code-1.0"),
    "DeepSeek-V2": OnHub("deepseek-ai/DeepSeek-V2-Lite-Chat"),
    "DeepSeek-V3": OnHub("deepseek-ai/DeepSeek-V3 --tp 8", "moonshotai/Kimi-K2-Instruct --tp 16 --trust-remote-code"),
    "DeepSeek-V4": OnHub("deepseek-ai/DeepSeek-V4-Flash --tp 4"),
    "ERNIE 4.5": OnHub("baidu/ERNIE-4.5-21B-A3B-PT"),
    "EXAONE-MoE": OnHub("LGAI-EXAONE/K-EXAONE-236B-A23B --tp 8", without="its sliding-window attention"),
    "Gemma 4": OnHub(
        "google/gemma-4-26B-A4B-it",
        untested="Gemma4ForConditionalGeneration",
        without="its sliding-window attention, and images",
    ),
    "GLM-4-MoE": OnHub("zai-org/GLM-4.6 --tp 8"),
    "GLM-4.7-Flash": OnHub("zai-org/GLM-4.7-Flash"),
    "GLM-5.2": OnHub(
        "zai-org/GLM-5.2 --tp 16",
        without="its sparse-attention indexer, for CUDA only; it would choose every token of the test's short texts",
    ),
    "gpt-oss": OnHub("openai/gpt-oss-120b"),
    "Granite 4": OnHub("ibm-granite/granite-4.0-h-small", without="its Mamba layers"),
    "Granite-MoE": OnHub("ibm-granite/granite-3.1-3b-a800m-instruct"),
    "Granite-MoE shared": OnHub("ibm-research/moe-7b-1b-active-shared-experts"),
    "HunYuan v1": OnHub("tencent/Hunyuan-A13B-Instruct --tp 4", without="its query and key norms"),
    "HunYuan v3": OnHub("tencent/Hy3 --tp 8"),
    "Kimi K2.5": OnHub("moonshotai/Kimi-K2.5 --tp 8 --trust-remote-code", without="images"),
    "Kimi K3": OnHub(
        "moonshotai/Kimi-K3 --tp 16 --trust-remote-code",
        untested="KimiK3ForConditionalGeneration",
        without="images; the merging of weights at loading",
    ),
    "Laguna": OnHub("poolside/Laguna-XS.2"),
    "Mellum": OnHub("JetBrains/Mellum2-12B-A2.5B-Instruct"),
    "MiniMax-M2": OnHub("MiniMaxAI/MiniMax-M2 --tp 4 --trust-remote-code", without="its query and key norms"),
    "MiniMax-M3": OnHub(
        "MiniMaxAI/MiniMax-M3 --tp 8", untested="MiniMaxM3SparseForConditionalGeneration", without="images"
    ),
    "Mixtral": OnHub("mistralai/Mixtral-8x7B-Instruct-v0.1 --tp 2"),
    "Nemotron 3": OnHub(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        without="the parts of its layers that have no CPU code: `test/served/layers.py` computes them",
    ),
    "OLMoE": OnHub("allenai/OLMoE-1B-7B-0924-Instruct"),
    "Qwen2-MoE": OnHub("Qwen/Qwen1.5-MoE-A2.7B-Chat"),
    "Qwen3-MoE": OnHub("Qwen/Qwen3-235B-A22B --tp 8"),
    "Qwen3-Next": OnHub("Qwen/Qwen3-Next-80B-A3B-Instruct --tp 4", without=LINEAR),
    "Qwen3.5-MoE": OnHub("Qwen/Qwen3.5-35B-A3B --tp 2", without=f"images; {LINEAR}"),
    "Qwen3.8-Flash-Next": OnHub(
        "Qwen/Qwen3.8-Flash-Next --tp 8", without=f"images; its sparse-attention indexer, for CUDA only; {LINEAR}"
    ),
    "Step-3.5": OnHub("stepfun-ai/Step-3.5-Flash --tp 4 --trust-remote-code"),
}
"""By name: each has a tiny model in `family.py`, `hybrids.py`, `gemma.py`, `recent.py` or
`test/fake_gpu/models.py`.
"""
