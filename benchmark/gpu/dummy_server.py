"""An SGLang server for checkpoints without weights, in which routing activates as many experts as in trained models.

    python -m benchmark.gpu.dummy_server --model-path DIR --load-format dummy ...

SGLang's dummy loader draws every tensor from U(-0.001, 0.001), including norms and router biases. With gpt-oss, all
rows of a batch then use the same four experts, so a policy cannot drop any. This server changes some tensors:

- Norms are 1, and biases are 0.
- All embeddings share a part of their variance (`share_of`). So the rows of a batch agree as in the trained model.
- Routers are scaled so that their logits have unit variance.
- MXFP4 experts have random bits and a constant scale.

The other weights are small and hardly change the hidden states, so the rows agree equally in all layers.

If `toggle.TOGGLED` is set, the server captures its decode graphs twice. With EAGLE-3 and simulated acceptance, the last
token of each verify step is random. SGLang would use the likeliest token, which repeats with random weights.

SGLang's scheduler processes also import this module when they are spawned, so they also use the changed loader.
"""

import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

from benchmark.gpu import toggle
from benchmark.gpu.moe_layer import share_of

# The E8M0 code of 2^-10. The largest value in MXFP4 is 6, so an expert's weights stay below 0.006.
MXFP4_SCALE = 127 - 10
_vocabulary: list[int] = []
"""The number of rows in each embedding table that this process has initialized."""


def initialize(model: nn.Module, seed: int = 1234) -> None:
    """Initialize the tensors that affect the routing, on any device. The other tensors stay unchanged."""
    routers = {id(tensor) for module in model.modules() for tensor in _router_weights(module)}
    common = share_of(getattr(getattr(model, "config", None), "model_type", ""))
    for number, (name, tensor) in enumerate(model.state_dict(keep_vars=True).items()):
        # Each tensor has its own seed. Otherwise the first expert of every router would have the same random numbers as
        # the part that all embeddings share.
        generator = torch.Generator(tensor.device).manual_seed(seed + number)
        with torch.no_grad():
            if id(tensor) in routers:
                tensor.copy_(_normal(tensor, generator) * tensor.shape[-1] ** -0.5)
            elif tensor.dtype == torch.uint8 and name.endswith("scale"):
                tensor.fill_(MXFP4_SCALE)
            elif tensor.dtype == torch.uint8:  # two 4-bit numbers per byte
                tensor.random_(0, 256, generator=generator)
            elif "bias" in name and tensor.is_floating_point():
                tensor.zero_()
            elif "norm" in name and tensor.is_floating_point():
                tensor.fill_(1.0)
            elif "embed_tokens" in name:
                shared = _normal(tensor[:1], generator)
                tensor.copy_(common**0.5 * shared + (1 - common) ** 0.5 * _normal(tensor, generator))
                _vocabulary.append(len(tensor))


def _router_weights(module: nn.Module) -> list[Tensor]:
    """Return the router weights of a module, or an empty list if the module is not an MoE block."""
    if not hasattr(module, "topk"):
        return []
    gates = [gate for name in ("gate", "router") if (gate := getattr(module, name, None)) is not None]
    return [gate.weight for gate in gates]


def _normal(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(tensor.shape, generator=generator, device=tensor.device)


def install() -> None:
    """Patch SGLang's dummy loader so that it calls `initialize`. Raises RuntimeError if the loader does not exist."""
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
    if float(os.environ.get("SGLANG_SIMULATE_ACC_LEN", "-1")) > 0:
        draw_bonus_tokens()
    if os.environ.get(toggle.TOGGLED) == "1":
        toggle.install()


def draw_bonus_tokens() -> None:
    """Patch simulated acceptance so that the last token of each step is random.

    SGLang uses the likeliest token of the target model here, even if requests use a temperature. With random tokens,
    the draft tokens also vary, because the draft model computes them from the last token.
    """
    from sglang.srt.speculative import spec_utils

    upstream = spec_utils.generate_simulated_accept_index

    def generate_simulated_accept_index(*args: Any, predict: Tensor, num_correct_drafts: Tensor, **kwargs: Any) -> Any:
        accepted = upstream(*args, predict=predict, num_correct_drafts=num_correct_drafts, **kwargs)
        last = accepted.gather(1, num_correct_drafts.long()[:, None]).flatten().long()
        predict[last] = torch.randint(min(_vocabulary), last.shape, dtype=predict.dtype, device=predict.device)
        return accepted

    spec_utils.generate_simulated_accept_index = generate_simulated_accept_index


def main() -> None:
    """Start the server as `python -m sglang.launch_server` does.

    Spawned processes import the main module again, so the main module must be this one.
    """
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
