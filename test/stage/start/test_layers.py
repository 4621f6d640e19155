"""How a loaded model's layers are found or refused."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_xshare.stage.start import layers as start_layers
from sglang_xshare.stage.start.arguments import read_arguments
from sglang_xshare.stage.start.refusal import REFUSED, ExpertPolicyError
from sglang_xshare.stage.upstream import find_runner

pytest.importorskip("sglang.srt.layers.moe", reason="needs an installed SGLang")
from sglang.srt import runtime_context
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import SharedExpertsConfig, TopK, TopKConfig, TopKOutputFormat
from sglang.srt.layers.moe.utils import MoeRunnerBackend

FORMATS = TopKOutputFormat
NO_POLICY = "cannot be served with an expert policy"


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

    def __init__(self, backend: str | None) -> None:
        self.backend = backend

    def get_moe_runner_backend(self, layer: torch.nn.Module) -> MoeRunnerBackend | None:
        return self.backend and MoeRunnerBackend(self.backend)


class Loaded(torch.nn.Module):
    """A loaded model: MoE layers, each router with its config, and runners of a backend."""

    def __init__(self, configs: list[TopKConfig], runners: int, backend: str | None = "triton") -> None:
        super().__init__()
        for layer_id, topk_config in enumerate(configs):
            self.add_module(f"topk-{layer_id}", bare(TopK, layer_id=layer_id, topk_config=topk_config))
        for layer_id in range(runners):
            self.add_module(f"experts-{layer_id}", bare(FusedMoE, quant_method=Method(backend)))


@pytest.fixture
def read(monkeypatch) -> Callable[..., Any]:
    """Call it with a model's routers and flags for the layers the stage finds."""
    monkeypatch.setattr(start_layers, "read_placement", lambda model_runner: None)

    def find(
        configs: list[TopKConfig],
        runners: int,
        function=start_layers.read_layers,
        backend: str | None = "triton",
        **flags: Any,
    ) -> Any:
        usual = {"model_path": "model", "speculative_algorithm": None, "pp_size": 1, "dp_size": 1}
        server_args = SimpleNamespace(**{"expert_policy": "xshare", **usual, **flags})
        runner = SimpleNamespace(model=Loaded(configs, runners, backend), server_args=server_args, device="cuda")
        return function(runner, read_arguments(server_args))

    return find


def test_every_router_is_found_with_its_config(read):
    configs = [config(), config(top_k=2)]
    layers = read(configs, runners=2)
    assert [found is given for (found, _), given in zip(layers, configs, strict=True)] == [True, True]
    assert [(layer.layer_id, layer.router.top_k) for _, layer in layers] == [(0, 4), (1, 2)]


@pytest.mark.parametrize(("layer_id", "found"), [(5, 5), (None, 3)])
def test_a_router_that_is_not_told_its_layer_has_it_in_its_name(layer_id, found, monkeypatch):
    """As Mixtral's before 0.5.22: overrides by layer and the trace need the number."""
    monkeypatch.setattr(start_layers, "read_placement", lambda model_runner: None)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict({"3": torch.nn.Module()})
    model.layers["3"].topk = bare(TopK, layer_id=layer_id, topk_config=config())
    overrides = {"k0": 1, "layers": {str(found): {"add": 2}}}
    usual = {"model_path": "model", "speculative_algorithm": None, "pp_size": 1, "dp_size": 1}
    server_args = SimpleNamespace(expert_policy="xshare", expert_policy_config=overrides, **usual)
    arguments = read_arguments(server_args)
    runner = SimpleNamespace(model=model, server_args=server_args, device="cpu")
    ((_, layer),) = start_layers.read_layers(runner, arguments)
    assert layer.layer_id == found
    assert arguments.schedule.plan(layer.layer_id, 16).add == 2


def test_more_routers_than_runners_are_served(read):
    """DeepSeek's first model runs its experts without a FusedMoE."""
    assert len(read([config(), config()], runners=0)) == 2


SERVED = ("triton", "triton_kernel", "cutlass", "marlin")


@pytest.mark.parametrize("backend", [one.value for one in MoeRunnerBackend if one.value != "auto"])
def test_each_layer_runs_what_takes_filled_slots_whatever_the_flag_was(backend, read):
    """`auto` is no runner: aiter keeps one slot of an expert that comes twice, of weight 0 or not."""
    if backend in SERVED:
        assert len(read([config()], 1, backend=backend)) == 1
        return
    line = f"experts-0 experts: {NO_POLICY}: MoE runner {backend}, which is not known to take one expert twice"
    with pytest.raises(
        ExpertPolicyError, match=f"^{re.escape(line)} in a row's slots; allowed is --moe-runner-backend"
    ):
        read([config()], 1, backend=backend)


def test_a_kernel_without_a_runner_is_not_known(read):
    with pytest.raises(ExpertPolicyError, match="a kernel of Method, which is not known"):
        read([config()], 1, backend=None)


def test_older_releases_keep_the_runner_in_the_method_its_scheme_or_a_kernel():
    def runner(name: str) -> SimpleNamespace:
        return SimpleNamespace(runner_backend=MoeRunnerBackend(name))

    plain = SimpleNamespace(quant_method=SimpleNamespace(runner=runner("marlin")))
    scheme = SimpleNamespace(quant_method=SimpleNamespace(), scheme=SimpleNamespace(runner=runner("triton")))
    kernel = SimpleNamespace(runner=runner("marlin"))
    awq = SimpleNamespace(quant_method=SimpleNamespace(), scheme=SimpleNamespace(kernel=kernel))
    amd = SimpleNamespace(quant_method=SimpleNamespace(runner=runner("triton"), _aiter_runner=runner("aiter")))
    assert [find_runner(layer) for layer in (plain, scheme, awq, amd)] == ["marlin", "triton", "marlin", "aiter"]
    assert find_runner(SimpleNamespace(quant_method=SimpleNamespace())) is None


SHARED = SharedExpertsConfig(num_fused_shared_experts=1)
MOE_SPEC = {
    "expert_policy": "moe-spec",
    "expert_policy_config": {"budget": 8, "coverage": "truncate", "phases": ["decode"]},
}
UNSERVED: dict[str, tuple[list[TopKConfig], int, dict[str, Any], str]] = {
    "a layer without TopK": (
        [config()],
        2,
        {},
        f"--model-path model: {NO_POLICY}: 1 TopK modules for 2 MoE layers; allowed is one for each",
    ),
    "no layer": (
        [],
        0,
        {},
        f"--model-path model: {NO_POLICY}: 0 TopK modules for 0 MoE layers; allowed is one for each",
    ),
    "an unknown router": (
        [config(), config(scoring_func="tanh")],
        2,
        {},
        f"topk-1 router: {NO_POLICY}: scoring function 'tanh', allowed is softmax, sigmoid, sqrtsoftplus",
    ),
    "routing in the kernel": (
        [config(FORMATS.BYPASSED)],
        1,
        {},
        f"topk-0 router: {NO_POLICY}: routing inside the MoE kernel; "
        "allowed is a runner with standard or triton_kernels output",
    ),
    "shared experts whose slots are not sorted": (
        [config(top_k=5, use_grouped_topk=True, num_expert_group=2, topk_group=1, shared_experts=SHARED)],
        1,
        {"expert_policy_align": True},
        f"topk-0 router: {NO_POLICY}: its runner takes shared experts' slots too, which --expert-policy-align does not "
        "sort; allowed is --disable-shared-experts-fusion",
    ),
    "a share of what does not renormalize": (
        [config(), config(renormalize=False)],
        2,
        {"expert_policy": "oea", "expert_policy_config": {"own_share": 0.75}},
        f"topk-1 router: {NO_POLICY}: own_share = 0.75: allowed only with a model that renormalizes its weights",
    ),
    "truncation by a runner that ranks logits": (
        [config(FORMATS.TRITON_KERNEL)],
        1,
        MOE_SPEC,
        f"topk-0 router: {NO_POLICY}: coverage = 'truncate': a runner that ranks logits itself renormalizes; "
        "allowed is substitute or own",
    ),
}


@pytest.mark.parametrize("case", UNSERVED)
def test_what_only_a_loaded_model_shows_ends_the_process_with_one_line(case, read, capsys, monkeypatch):
    configs, runners, flags, line = UNSERVED[case]
    with pytest.raises(ExpertPolicyError, match=f"^{re.escape(line)}$"):
        read(configs, runners, **flags)
    for rank in (0, 1):
        monkeypatch.setattr(runtime_context, "get_parallel", lambda rank=rank: SimpleNamespace(tp_rank=rank))
        with pytest.raises(SystemExit) as ended:
            read(configs, runners, start_layers.find_layers, **flags)
        assert not isinstance(ended.value, Exception), "upstream logs a traceback of every Exception"
        assert ended.value.code == REFUSED
        assert capsys.readouterr().err == (f"{line}\n" if rank == 0 else ""), "ranks refuse alike"


def test_a_replica_that_refuses_its_model_is_killed_by_upstream(read):
    """SGLang's controller would wait forever for a replica that just ended; for one that raises, it ends the server."""
    with pytest.raises(ExpertPolicyError, match="0 TopK modules"):
        read([], 0, start_layers.find_layers, dp_size=2)


def test_a_pipeline_rank_need_not_have_every_layer(read):
    layers = {"expert_policy_config": {"k0": 1, "add": 4, "layers": {"7": {"k0": 2}, "0-1": {"policy": "vanilla"}}}}
    assert len(read([config(), config()], 2, pp_size=2, **layers)) == 2
    with pytest.raises(ExpertPolicyError, match="layers 7: the model's layers are 0 to 1"):
        read([config(), config()], 2, **layers)
