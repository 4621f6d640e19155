"""Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon): momentum with orthogonalized updates.

`torch.optim.Muon` takes single matrices only; a layer's experts are one [experts, rows, columns] tensor here.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
STEPS = 5


class Muon(Optimizer):
    """Nesterov momentum; every matrix [..., rows, columns] is updated by the nearest orthogonal matrix."""

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                velocity = self.state[parameter].setdefault("velocity", torch.zeros_like(parameter))
                velocity.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalize(parameter.grad.lerp(velocity, group["momentum"]))
                rows, columns = parameter.shape[-2:]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Bring all singular values of [..., rows, columns] to about 0.7 - 1.2 by a quintic Newton-Schulz iteration."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
