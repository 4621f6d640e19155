"""FlashInfer's norms in torch: its kernels are compiled by CuTe DSL, whose own runtime finds no driver here."""

from typing import Any


def install(module: Any) -> None:
    """Have `flashinfer.norm` call these in place of its compiled kernels; FLASHINFER_USE_CUDA_NORM=1 has it do so."""
    module.get_norm_module = Norms


class Norms:
    """The functions of FlashInfer's compiled module that SGLang calls."""

    @staticmethod
    def rmsnorm(out: Any, x: Any, weight: Any, eps: float, early: Any, bias: float = 0.0) -> None:
        """out = x / rms(x) * (weight + bias)"""
        wide = x.float()
        scaled = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        out.copy_(scaled * (weight.float() + bias))

    @staticmethod
    def gemma_rmsnorm(out: Any, x: Any, weight: Any, eps: float, early: Any) -> None:
        """With weights around 0."""
        Norms.rmsnorm(out, x, weight, eps, early, 1.0)

    @staticmethod
    def fused_add_rmsnorm(x: Any, residual: Any, weight: Any, eps: float, early: Any) -> None:
        """residual += x; x = the norm of it"""
        residual.add_(x)
        Norms.rmsnorm(x, residual, weight, eps, early)

    @staticmethod
    def gemma_fused_add_rmsnorm(x: Any, residual: Any, weight: Any, eps: float, early: Any) -> None:
        """With weights around 0."""
        residual.add_(x)
        Norms.rmsnorm(x, residual, weight, eps, early, 1.0)
