"""A loaded model as the stage finds one: upstream's classes, without what their constructors need of a server."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_xshare.compatibility import layers as start_layers
from sglang_xshare.compatibility.arguments import read_arguments

pytest.importorskip("sglang.srt.layers.moe", reason="needs an installed SGLang")
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import TopK, TopKConfig, TopKOutputFormat
from sglang.srt.layers.moe.utils import MoeRunnerBackend

FORMATS = TopKOutputFormat


def config(output_format: TopKOutputFormat | None = FORMATS.STANDARD, **changes: Any) -> TopKConfig:
    return TopKConfig(**{"top_k": 4, "renormalize": True, "output_format": output_format, **changes})


def bare(kind: type[torch.nn.Module], **attributes: Any) -> torch.nn.Module:
    """A module of upstream's class, without what its constructor needs of a running server."""
    module = object.__new__(kind)
    torch.nn.Module.__init__(module)
    vars(module).update(attributes)
    return module


class Method:
    """A quantization method as 0.5.23 has it: it names what it runs."""

    def __init__(self, backend: str | None, **marks: Any) -> None:
        self.backend = backend
        vars(self).update(marks)

    def get_moe_runner_backend(self, layer: torch.nn.Module) -> MoeRunnerBackend | None:
        return self.backend and MoeRunnerBackend(self.backend)


class Loaded(torch.nn.Module):
    """A loaded model: MoE layers, each router with its config, and runners of a backend."""

    def __init__(self, configs: list[TopKConfig], runners: int, method: Method, **attributes: Any) -> None:
        super().__init__()
        usual = {"num_fused_shared_experts": 0, "supports_deferred_finalize": False}
        for layer_id, topk_config in enumerate(configs):
            self.add_module(f"topk-{layer_id}", bare(TopK, layer_id=layer_id, topk_config=topk_config))
        for layer_id in range(runners):
            experts = bare(FusedMoE, quant_method=method, layer_id=layer_id, **{**usual, **attributes})
            self.add_module(f"experts-{layer_id}", experts)


def kind(name: str) -> type[Method]:
    """A quantization method that is called so."""
    return type(name, (Method,), {})


UNQUANTIZED, FP8, NVFP4, MXFP4 = (
    kind(name)
    for name in ("UnquantizedFusedMoEMethod", "Fp8MoEMethod", "ModelOptNvFp4FusedMoEMethod", "Mxfp4MoEMethod")
)
USUAL = {
    **{"model_path": "model", "speculative_algorithm": None, "dp_size": 1, "ep_size": 1},
    **{"ep_dispatch_algorithm": None, "enable_return_routed_experts": False},
}


def find(configs, runners=None, function=start_layers.read_layers, method="triton", attributes=None, **flags):
    """The layers that the stage finds in a model of these routers, each with a runner, on a server with these flags."""
    server_args = SimpleNamespace(**{"expert_policy": "xshare", **USUAL, **flags})
    method = method if isinstance(method, Method) else Method(method)
    model = Loaded(configs, len(configs) if runners is None else runners, method, **attributes or {})
    runner = SimpleNamespace(model=model, server_args=server_args, device="cuda")
    return function(runner, read_arguments(server_args))
