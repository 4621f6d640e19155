"""The optimizer Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon).

Muon uses momentum with orthogonalized updates. `torch.optim.Muon` accepts only two-dimensional matrices, but here the
experts of a layer are one tensor [experts, rows, columns].
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
STEPS = 5


class Muon(Optimizer):
    """An optimizer with Nesterov momentum, in which the update of every matrix is approximately orthogonal.

    Parameters have the shape [..., rows, columns].
    """

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
    """Make matrices [..., rows, columns] approximately orthogonal with a quintic Newton-Schulz iteration.

    The singular values of the results are between about 0.7 and 1.2.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
