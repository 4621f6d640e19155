"""Tables of SGLang's model classes. They show which classes tests have run with a policy, and which are refused.

The tables describe SGLang 0.5.23. All other classes are untested. When a server has loaded a model of an untested
class, it checks that each MoE layer has one known `TopK` module.
"""

_GATE = "its routing function takes the gate's weights, not logits"
_BYPASSES = "its router is no TopK"
_BLOCKS = "it decodes blocks of tokens in extend forwards, which a policy treats as prefill"
_TRANSFORMERS = "it routes in transformers' own code"

EXECUTED = {
    "Cohere2MoeForCausalLM": "Cohere 2 MoE",
    "DeepseekV2ForCausalLM": "DeepSeek-V2",
    "DeepseekV3ForCausalLM": "DeepSeek-V3",
    "DeepseekV4ForCausalLM": "DeepSeek-V4",
    "Ernie4_5_MoeForCausalLM": "ERNIE 4.5",
    "ExaoneMoeForCausalLM": "EXAONE-MoE",
    "Gemma4ForCausalLM": "Gemma 4",
    "Glm4MoeForCausalLM": "GLM-4-MoE",
    "Glm4MoeLiteForCausalLM": "GLM-4.7-Flash",
    "GlmMoeDsaForCausalLM": "GLM-5.2",
    "GptOssForCausalLM": "gpt-oss",
    "GraniteMoeForCausalLM": "Granite-MoE",
    "GraniteMoeHybridForCausalLM": "Granite 4",
    "GraniteMoeSharedForCausalLM": "Granite-MoE shared",
    "HYV3ForCausalLM": "HunYuan v3",
    "HunYuanMoEV1ForCausalLM": "HunYuan v1",
    "KimiK25ForConditionalGeneration": "Kimi K2.5",
    "KimiK3LinearForCausalLM": "Kimi K3",
    "LagunaForCausalLM": "Laguna",
    "MellumForCausalLM": "Mellum",
    "MiniMaxM2ForCausalLM": "MiniMax-M2",
    "MiniMaxM3SparseForCausalLM": "MiniMax-M3",
    "MixtralForCausalLM": "Mixtral",
    "NemotronHForCausalLM": "Nemotron 3",
    "OlmoeForCausalLM": "OLMoE",
    "Qwen2MoeForCausalLM": "Qwen2-MoE",
    "Qwen3MoeForCausalLM": "Qwen3-MoE",
    "Qwen3NextForCausalLM": "Qwen3-Next",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3.5-MoE",
    "Qwen4ExpForConditionalGeneration": "Qwen3.8-Flash-Next",
    "Step3p5ForCausalLM": "Step-3.5",
}
"""Model classes that tests have run in real servers, each with the name of its model family.

The servers ran on a CPU (`test/served`) or on a simulated GPU (`test/fake_gpu`).
"""

UNSERVED = {
    # With these classes a policy would select nothing, or would select for only one of several layers.
    "LLaDA2MoeModelLM": _BLOCKS,
    "SDARMoeForCausalLM": _BLOCKS,
    "DiffusionGemmaForBlockDiffusion": _BLOCKS,
    "InternS2MobiusForConditionalGeneration": "several of its layers share a router, and would count as one",
    "NemotronHPuzzleForCausalLM": "its layers differ in their number of experts",
    # The checks of a loaded model would also refuse these classes. This table refuses them before the weights load.
    "Grok1ForCausalLM": _GATE,
    "Grok1ModelForCausalLM": _GATE,
    "PhiMoEForCausalLM": "its router masks the first expert before it picks the second, and has a softmax for each",
    "Ernie4_5_VLMoeForConditionalGeneration": "its layers have a second router, for images",
    "LongcatFlashForCausalLM": "some of its experts have no weights, and would count as active",
    "InklingForConditionalGeneration": _BYPASSES,
    "MuseSparkForConditionalGeneration": _BYPASSES,
    "QuantMixtralForCausalLM": _BYPASSES,
    "ZayaForCausalLM": _BYPASSES,
    "MindSporeForCausalLM": "it routes in MindSpore's own code",
    "TransformersMoEEmbeddingModel": _TRANSFORMERS,
    "TransformersMoEForCausalLM": _TRANSFORMERS,
    "TransformersMoEForSequenceClassification": _TRANSFORMERS,
    "TransformersMultiModalMoEEmbeddingModel": _TRANSFORMERS,
    "TransformersMultiModalMoEForCausalLM": _TRANSFORMERS,
    "TransformersMultiModalMoEForSequenceClassification": _TRANSFORMERS,
}

FUSED_FRONTS = frozenset({"KimiK3ForConditionalGeneration", "KimiK3LinearForCausalLM"})
"""Model classes that compute the gate and TopK in one kernel for some numbers of rows.

SGLang does not use this kernel if the environment variable SGLANG_K3_FUSED_FRONT is off. In every supported release
only `KimiK3MoE._ep_front` calls the kernel.
"""

GATHERED = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Glm4MoeForCausalLM",
        "GptOssForCausalLM",
        "MiniMaxM2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
    }
)
"""Model classes that support data-parallel attention. Other classes would add up rows of different requests."""

ALL_TO_ALL = GATHERED - {"GptOssForCausalLM"}
"""Model classes that support the all-to-all backend deepep. Their MoE layers route only their own rank's rows."""

DISPATCHED = frozenset({"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"})
"""Model classes that also support the all-to-all backends mooncake and nixl.

The code of the other classes in `ALL_TO_ALL` tests for the name deepep. With another backend, these classes would add
up rows of different ranks.
"""
