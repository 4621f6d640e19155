"""The MoE runner that SGLang selects for a server's experts, and other runners that could run the experts."""

from dataclasses import dataclass
from typing import Any

from ..upstream.server import is_release, model_config, resolved, routes_own_rows, spell
from .formats import Capability, Format, read_format
from .runners import list_runners


@dataclass(frozen=True)
class Experts:
    """The MoE runner of a server, and the properties that decide which runners can run its experts.

    - `runner` is the MoE runner. "auto" means triton, marlin, or a kernel that is known only after the weights have
      loaded. If the format has its own kernel, `runner` is that kernel, whatever --moe-runner-backend is.
    - `format` is the format of the experts' weights.
    - `capability` is the GPU's compute capability, or None for AMD's GPUs.
    - `aiter` is True if AMD's aiter is enabled.
    """

    runner: str
    format: Format
    capability: Capability | None
    aiter: bool
    ep_size: int

    @property
    def served(self) -> bool:
        """Return whether the server's MoE runner supports a policy."""
        return self.serves(self.runner)

    def serves(self, runner: str) -> bool:
        """Return whether an MoE runner supports a policy for experts of this format."""
        return runner in ("auto", *list_runners()) and runner not in self.format.unserved

    def list_fitting(self) -> list[str]:
        """Return the runners that support a policy and can run these experts on this GPU. The best runner is first."""
        return [runner for runner in self.format.fitting if self.serves(runner) and self._runs(runner)]

    def _runs(self, runner: str) -> bool:
        """Return whether the GPU can run an MoE runner. The runner must support the format of the experts."""
        if self.capability is None:
            since = self.format.triton_beside_aiter
            return runner == "triton" and (not self.aiter or (since is not None and is_release(since)))
        if runner == "marlin":
            return self.capability >= self.format.marlin_from
        if runner.startswith("flashinfer_trtllm"):
            return (10, 0) <= self.capability < (11, 0)
        if runner == "triton_kernel":
            return self.ep_size == 1 and _has_triton_kernels(self.capability)
        return True


def read_experts(server_args: Any) -> Experts | None:
    """Return how a server runs its experts. SGLang must have resolved the arguments.

    Return None if the server has no GPU, or if it uses an all-to-all backend.
    """
    config = resolved(server_args)
    if str(config.device) != "cuda" or routes_own_rows(config):
        return None
    is_amd = _is_amd()
    capability = None if is_amd else _read_capability()
    if capability is None and not is_amd:
        return None
    from sglang.srt.utils import get_bool_env_var

    runner, aiter = spell(config.moe_runner_backend), is_amd and bool(get_bool_env_var("SGLANG_USE_AITER"))
    form = read_format(model_config(server_args), config.quantization)
    if form.own_kernel is not None:
        runner = form.own_kernel
    elif runner == "auto":  # each layer chooses its own runner
        if capability is None:
            runner = "aiter" if aiter and form.by_aiter else "auto"
        elif capability >= (10, 0):
            runner = form.blackwell
    return Experts(runner, form, capability, aiter, config.ep_size)


def ranks_logits(config: Any) -> bool:
    """Return whether the MoE runner itself selects the top-k experts from the logits.

    triton_kernel does so, and flashinfer_mxfp4 does so on SM100 GPUs. `config` contains the resolved arguments.
    """
    runner = spell(config.moe_runner_backend)
    if runner != "flashinfer_mxfp4" or str(config.device) != "cuda":
        return runner == "triton_kernel"
    return (10, 0) <= (_read_capability() or (0, 0)) < (11, 0)


def _is_amd() -> bool:
    try:
        from sglang.srt.runtime_context import get_platform
    except ImportError:  # before 0.5.19
        from sglang.srt.utils import is_hip

        return bool(is_hip())
    return bool(get_platform().is_hip)


def _read_capability() -> Capability | None:
    import torch

    try:
        major, minor = torch.cuda.get_device_capability()
    except (RuntimeError, AssertionError):  # there is no driver, or PyTorch has no CUDA
        return None
    return major, minor


def _has_triton_kernels(capability: Capability) -> bool:
    """Return whether triton_kernels is available and can run MXFP4 on this GPU.

    The library supports Hopper GPUs. It supports data-center Blackwell GPUs only with drivers before 595 (gpt_oss.py).
    """
    from sglang.srt.utils import common

    if not (9, 0) <= capability < (11, 0) or not common.is_triton_kernels_available():
        return False
    return capability < (10, 0) or common.get_nvidia_driver_version() < (595,)
