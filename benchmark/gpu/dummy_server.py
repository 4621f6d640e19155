"""SGLang's server for checkpoints without weights, with routers that spread rows over as many experts as trained ones.

    python -m benchmark.gpu.dummy_server --model-path DIR --load-format dummy ...

Upstream draws every tensor from U(-0.001, 0.001), norms and router biases too: with gpt-oss all rows of a batch then
have the same four experts, and a policy has nothing to drop. Here, in every server and under every policy: norms are
1, biases 0; embeddings share a part of their variance (`share_of`), so the rows of a batch agree as in the trained
model; routers have logits of unit variance; mxfp4 experts get random bits and one scale. The other weights are small
and hardly move a hidden state away from its embedding, so rows agree equally in all layers.

With `toggle.TOGGLED` set the server captures its decode graphs twice. Under EAGLE-3 with simulated acceptance the
last token of each verify step is drawn: upstream takes the likeliest one, which repeats with random weights.

SGLang's scheduler processes import this module when they are spawned, and so get its loader too.
"""

import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

from benchmark.gpu import toggle
from benchmark.gpu.moe_layer import share_of

# E8M0 for 2^-10: with mxfp4's largest value, 6, an expert's weights stay below 0.006.
MXFP4_SCALE = 127 - 10
_vocabulary: list[int] = []
"""Rows of the embeddings that this process has redrawn."""


def initialize(model: nn.Module, seed: int = 1234) -> None:
    """Redraw the tensors that decide the routing, on any device; the others stay as upstream drew them."""
    routers = {id(tensor) for module in model.modules() for tensor in _router_weights(module)}
    common = share_of(getattr(getattr(model, "config", None), "model_type", ""))
    for number, (name, tensor) in enumerate(model.state_dict(keep_vars=True).items()):
        # With one seed, the first expert of every router would be the direction that all embeddings share.
        generator = torch.Generator(tensor.device).manual_seed(seed + number)
        with torch.no_grad():
            if id(tensor) in routers:
                tensor.copy_(_normal(tensor, generator) * tensor.shape[-1] ** -0.5)
            elif tensor.dtype == torch.uint8 and name.endswith("scale"):
                tensor.fill_(MXFP4_SCALE)
            elif tensor.dtype == torch.uint8:  # blocks of two 4-bit floats a byte
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
    """Return the weight of the gate beside a `TopK`, if the module is an MoE block."""
    if not hasattr(module, "topk"):
        return []
    gates = [gate for name in ("gate", "router") if (gate := getattr(module, name, None)) is not None]
    return [gate.weight for gate in gates]


def _normal(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(tensor.shape, generator=generator, device=tensor.device)


def install() -> None:
    """Make SGLang's dummy loader end with `initialize`. Raises RuntimeError if SGLang has no loader of that name."""
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
    """Make simulated acceptance end each step with a drawn token instead of the likeliest.

    Upstream takes the target's argmax also when requests sample, so a temperature changes nothing, and the kernels that
    verify drawn tokens stay unused. Drafts follow from the token before them, so they differ too.
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
    """Serve as `python -m sglang.launch_server` does. Spawned processes import the main module: it must be this."""
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
