"""SGLang's model classes in release 0.5.23: those that tests have executed with a policy, and those that are refused.

The code of the refused classes cannot be served. A class in neither table is untested: after loading the server checks
whether each MoE layer has one known `TopK`.
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
"""The family by class, run by real servers in tests: on a CPU (`test/served`), or a pretended GPU (`test/fake_gpu`)."""

UNSERVED = {
    # A policy would be on and choose nothing, or choose for one of several layers.
    "LLaDA2MoeModelLM": _BLOCKS,
    "SDARMoeForCausalLM": _BLOCKS,
    "DiffusionGemmaForBlockDiffusion": _BLOCKS,
    "InternS2MobiusForConditionalGeneration": "several of its layers share a router, and would count as one",
    "NemotronHPuzzleForCausalLM": "its layers differ in their number of experts",
    # The loaded model would show these; here they are refused before weights load.
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
"""Classes with one kernel for gate and TopK at some numbers of rows, unless SGLANG_K3_FUSED_FRONT is off: in every
release only `KimiK3MoE._ep_front` calls that kernel.
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
"""Classes with upstream's data-parallel attention: in others, ranks would add up rows of different requests."""

ALL_TO_ALL = GATHERED - {"GptOssForCausalLM"}
"""Classes whose layers route only this rank's rows, or none, under an all-to-all backend; not gpt-oss."""

DISPATCHED = frozenset({"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"})
"""Classes of `ALL_TO_ALL` that also do so under mooncake and nixl. The code of the other classes tests for deepep by
name, and would add up other ranks' rows.
"""
