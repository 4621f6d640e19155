"""What a server is asked for, as far as weights, memory and the estimate need it: where SGLang does not resolve its
arguments here, or is not installed, these need no more than a dozen of its flags.
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from ..compatibility.arguments import read_arguments
from ..parser import between, whole
from ..policies.keys import json_type
from ..upstream.server import attention_dp_size, spell


def _read_object(text: str) -> dict[str, Any]:
    """Return the JSON object that a flag has; the error of another value names it."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object (got {text[:200]})")
    return found


FLAGS: tuple[tuple[Any, ...], ...] = (
    ("model", str, None, "--model-path", "--model"),
    ("device", str, None, "--device"),
    ("config", str, None, "--config"),
    ("ranks", whole(), 1, "--tp-size", "--tensor-parallel-size", "--tp"),
    ("stages", whole(), 1, "--pp-size", "--pipeline-parallel-size", "--pp"),
    ("dp_size", whole(), 1, "--dp-size", "--data-parallel-size", "--dp"),
    ("attn_dp_size", whole(), 1, "--attn-dp-size"),
    ("ep_size", whole(), None, "--ep-size", "--expert-parallel-size", "--ep"),
    ("redundant", whole(0), 0, "--ep-num-redundant-experts"),
    ("moe_a2a_backend", str, "none", "--moe-a2a-backend"),
    ("draft_tokens", whole(), 1, "--speculative-num-draft-tokens"),
    ("speculates", bool, False, "--speculative-algorithm"),
    ("offloaded", lambda text: text != "0", False, "--cpu-offload-gb"),
    ("fraction", between(0.001, 1), None, "--mem-fraction-static"),
    ("slots", whole(), None, "--paged-experts-num-resident"),
    ("changes", _read_object, {}, "--json-model-override-args"),
    ("quantization", str, None, "--quantization"),
    ("dtype", str, "auto", "--dtype"),
    ("load_format", str, "auto", "--load-format"),
    ("cache_dtype", str, "auto", "--kv-cache-dtype"),
    ("revision", str, None, "--revision"),
    ("policy", str, None, "--expert-policy"),
    ("policy_config", str, None, "--expert-policy-config"),
    ("trace", str, None, "--expert-policy-trace"),
    ("on_disagreement", str, None, "--expert-policy-on-disagreement"),
)
"""Of each the attribute, what reads its value, the value where it is not given, and its spellings."""
SWITCHES = {
    "dp_attention": "--enable-dp-attention",
    "paged": "--enable-paged-experts",
    "masked": "--mask-padding-experts",
    "ignores_exact": "--expert-policy-ignore-client-exact",
}


class ServerFlags(argparse.Namespace):
    """What a server is asked for: its `model`, and whether the command line `names_model` and not its `--config` alone;
    `policy` spelt as `--expert-policy` takes it, with its `policy_config`; `fraction` of the GPU's memory for weights
    and KV cache, None where SGLang chooses; `ranks` of tensor parallelism, over which `ep_size` expert-parallel ranks
    and `dp_size` groups of data-parallel attention (1 without it) divide them. `stages` of a pipeline; `paged` where
    experts are paged into `slots` of each layer, None where no number is given; `offloaded` where other weights may be;
    `masked` where padding rows are, without a policy too.
    """

    model: str | None
    names_model: bool
    device: str | None
    policy: str | None
    policy_config: str | None
    trace: str | None
    on_disagreement: str | None
    ranks: int
    stages: int
    dp_size: int
    ep_size: int
    redundant: int
    moe_a2a_backend: str
    changes: dict[str, Any]
    quantization: str | None
    dtype: str
    load_format: str
    cache_dtype: str
    revision: str | None
    draft_tokens: int
    speculates: bool
    fraction: float | None
    paged: bool
    slots: int | None
    masked: bool
    ignores_exact: bool
    offloaded: bool

    @property
    def names_policy(self) -> bool:
        """Return whether a flag of the policy is given."""
        given = self.policy, self.policy_config, self.trace, self.on_disagreement
        return self.ignores_exact or any(value is not None for value in given)

    def check_policy(self) -> None:
        """Raise `ExpertPolicyError` for flags of the policy that a server refuses whatever its model is."""
        read_arguments(
            SimpleNamespace(
                expert_policy=self.policy,
                expert_policy_config=self.policy_config,
                expert_policy_trace=self.trace,
                expert_policy_on_disagreement=self.on_disagreement,
                expert_policy_ignore_client_exact=self.ignores_exact,
                mask_padding_experts=self.masked,
                enable_paged_experts=self.paged,
                speculative_algorithm="given" if self.speculates else None,
            )
        )

    def resolve(self, config: Any) -> None:
        """Take what SGLang has resolved."""
        self.ranks, self.ep_size = config.tp_size, config.ep_size
        self.dp_size = attention_dp_size(config)
        self.moe_a2a_backend = spell(getattr(config, "moe_a2a_backend", None) or "none")
        self.draft_tokens = config.speculative_num_draft_tokens or 1
        self.fraction = config.mem_fraction_static or self.fraction


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(re.sub(r"^argument ([^/:]*)[^:]*:", r"\1", message))


def read_flags(flags: Sequence[str]) -> ServerFlags:
    """Of the command line and its `--config`. Raises ValueError, one line, for wrong values and ranks."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name, kind, default, *spellings in FLAGS:
        parser.add_argument(*spellings, dest=name, type=kind, default=default)
    for name, spelling in SWITCHES.items():
        parser.add_argument(spelling, dest=name, action="store_true")
    alone, _ = parser.parse_known_args(flags)
    given, _ = parser.parse_known_args([*_list_flags(_read_config(alone.config)), *flags], ServerFlags())
    given.names_model = alone.model is not None
    if given.ep_size is None:
        given.ep_size = 1 if given.moe_a2a_backend == "none" else given.ranks
    if given.ranks % given.ep_size:
        raise ValueError(f"--ep-size {given.ep_size}: allowed is a divisor of --tp-size {given.ranks}")
    flag = "--dp-size" if given.dp_attention and given.attn_dp_size == 1 else "--attn-dp-size"
    given.dp_size = given.dp_size if flag == "--dp-size" else given.attn_dp_size
    if given.ranks % given.dp_size:
        beside = " with --enable-dp-attention" if given.dp_attention else ""
        raise ValueError(f"{flag} {given.dp_size}: allowed{beside} is a divisor of --tp-size {given.ranks}")
    if not given.paged:
        given.slots = None
    return given


def _read_config(file: str | None) -> dict[str, Any]:
    """Return the flags in the YAML file of a server's `--config`, none without one. Raises ValueError in one line."""
    if file is None:
        return {}
    must = f"--config {file}: must be a YAML file of the server's flags, *.yaml"
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError(f"--config {file}: reading it needs PyYAML, which is not installed") from None
    if Path(file).suffix.lower() not in (".yaml", ".yml"):
        raise ValueError(must)
    try:
        found = yaml.safe_load(Path(file).read_text())
    except OSError as error:
        raise ValueError(f"{must} ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{must} ({' '.join(str(error).split())})") from None
    if not isinstance(found or {}, dict):
        raise ValueError(f"{must} (got a {json_type(found)})")
    return found or {}


def _list_flags(written: dict[str, Any]) -> Iterator[str]:
    """The keys of a server's `--config` as its command line would have them."""
    for key, value in written.items():
        flag = f"--{str(key).replace('_', '-')}"
        if value is True:
            yield flag
        elif value is not None and value is not False:
            yield f"{flag}={value if isinstance(value, str) else json.dumps(value)}"
