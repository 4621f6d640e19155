"""SGLang's server for checkpoints without weights, with routers that spread rows over as many experts as
trained ones do.

    python -m benchmark.gpu.dummy_server --model-path DIR --load-format dummy ...

Upstream draws every tensor from U(-0.001, 0.001), norms and router biases too: with gpt-oss all rows of a batch then
have the same four experts, and a policy has nothing to take. Here, for every server alike, whatever its policy: norms
are 1, biases 0; embeddings share a part of their variance (`COMMON`), so that the rows of a batch agree as those of a
real one do; routers have logits of unit variance; mxfp4 experts get random bits and one scale. The small other weights
hardly move a hidden state away from its embedding, so that all layers see rows that agree equally.

SGLang's scheduler processes import this module anew when they are spawned, and so get its loader too.
"""

import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

from benchmark.gpu.moe_layer import COMMON

# E8M0 for 2^-10: with mxfp4's largest value, 6, an expert's weights stay below 0.006.
MXFP4_SCALE = 127 - 10


def initialize(model: nn.Module, seed: int = 1234) -> None:
    """Redraw the tensors, on whatever device, that decide where rows go; the others stay as upstream drew them."""
    routers = {id(tensor) for module in model.modules() for tensor in _router_weights(module)}
    for number, (name, tensor) in enumerate(model.state_dict(keep_vars=True).items()):
        # Of one seed, the first expert of every router would be the direction that all embeddings share.
        generator = torch.Generator(tensor.device).manual_seed(seed + number)
        with torch.no_grad():
            if id(tensor) in routers:
                tensor.copy_(_normal(tensor, generator) * tensor.shape[-1] ** -0.5)
            elif tensor.dtype == torch.uint8:
                _draw_mxfp4(name, tensor, generator)
            elif "bias" in name and tensor.is_floating_point():
                tensor.zero_()
            elif "norm" in name and tensor.is_floating_point():
                tensor.fill_(1.0)
            elif "embed_tokens" in name:
                shared = _normal(tensor[:1], generator)
                tensor.copy_(COMMON**0.5 * shared + (1 - COMMON) ** 0.5 * _normal(tensor, generator))
            # Otherwise as upstream drew it.


def _router_weights(module: nn.Module) -> list[Tensor]:
    """The weight of the gate beside a `TopK`, where the module is an MoE block."""
    if not hasattr(module, "topk"):
        return []
    gates = [gate for name in ("gate", "router") if (gate := getattr(module, name, None)) is not None]
    return [gate.weight for gate in gates]


def _draw_mxfp4(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Blocks of two 4-bit floats a byte, or their scales."""
    if name.endswith("scale"):
        tensor.fill_(MXFP4_SCALE)
    else:
        tensor.random_(0, 256, generator=generator)


def _normal(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(tensor.shape, generator=generator, device=tensor.device)


def install() -> None:
    """Have SGLang's dummy loader end with `initialize`. Raises RuntimeError where it has none that this knows."""
    from sglang.srt.model_loader import loader

    upstream: Any = getattr(loader, "initialize_dummy_weights", None)
    if upstream is None:
        raise RuntimeError("SGLang's loader has no initialize_dummy_weights: dummy routers cannot be given a spread")
    if getattr(upstream, "spreads_routers", False):
        return

    def initialize_dummy_weights(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        upstream(model, *args, **kwargs)
        initialize(model)

    initialize_dummy_weights.spreads_routers = True  # type: ignore[attr-defined]
    loader.initialize_dummy_weights = initialize_dummy_weights


def main() -> None:
    """What `python -m sglang.launch_server` does: that module must not become the main one, which is imported anew."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


install()

if __name__ == "__main__":
    main()
