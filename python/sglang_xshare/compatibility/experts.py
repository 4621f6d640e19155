"""What SGLang runs a model's experts with, as far as the configuration tells, and what else could run them."""

from dataclasses import dataclass, replace
from typing import Any

from ..upstream.server import is_release, model_config, resolved, routes_own_rows, spell
from .formats import Capability, Format, read_format
from .runners import list_runners


@dataclass(frozen=True)
class Experts:
    """How a server would run its experts: the `runner`, auto where its layers choose triton or marlin, or what only
    loading shows; the `format` of the weights; the GPU's `capability`, None on AMD; whether AMD's `aiter` is on.
    """

    runner: str
    format: Format
    capability: Capability | None
    aiter: bool
    ep_size: int

    @property
    def served(self) -> bool:
        """Whether a policy can be served with it."""
        return self.serves(self.runner)

    def serves(self, runner: str) -> bool:
        """Whether a policy can be served with this runner for these experts."""
        return runner in ("auto", *list_runners()) and runner not in self.format.unserved

    def list_fitting(self) -> list[str]:
        """The runners that can be served and that run these experts here, the best first."""
        return [runner for runner in self.format.fitting if self.serves(runner) and self._runs(runner)]

    def _runs(self, runner: str) -> bool:
        """Whether a runner that fits the format runs these experts on this GPU."""
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
    """Read resolved arguments. None without a GPU, and behind an all-to-all dispatcher: checked once loaded."""
    config = resolved(server_args)
    if str(config.device) != "cuda" or routes_own_rows(config):
        return None
    is_amd = _is_amd()
    capability = None if is_amd else _read_capability()
    if capability is None and not is_amd:
        return None
    from sglang.srt.utils import get_bool_env_var

    experts = Experts(
        runner=spell(config.moe_runner_backend),
        format=read_format(model_config(server_args), config.quantization),
        capability=capability,
        aiter=is_amd and bool(get_bool_env_var("SGLANG_USE_AITER")),
        ep_size=config.ep_size,
    )
    return experts if experts.runner != "auto" else replace(experts, runner=_choose_in_layers(experts))


def _choose_in_layers(experts: Experts) -> str:
    """What layers choose while the server's runner is auto; auto as in `Experts`."""
    if experts.format.own_kernel is not None:
        return experts.format.own_kernel
    if experts.capability is None:
        return "aiter" if experts.aiter and experts.format.by_aiter else "auto"
    return experts.format.blackwell if experts.capability >= (10, 0) else "auto"


def ranks_logits(config: Any) -> bool:
    """Whether a server's MoE runner ranks the logits, by its resolved arguments: gpt-oss's on sm100 does, too."""
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
    except (RuntimeError, AssertionError):  # no driver; a torch without CUDA
        return None
    return major, minor


def _has_triton_kernels(capability: Capability) -> bool:
    """Whether triton_kernels runs MXFP4 here: on Hopper, and the B200 with drivers before 595 (gpt_oss.py)."""
    from sglang.srt.utils import common

    if not (9, 0) <= capability < (11, 0) or not common.is_triton_kernels_available():
        return False
    return capability < (10, 0) or common.get_nvidia_driver_version() < (595,)
