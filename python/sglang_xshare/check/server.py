"""The server's flags that the report needs. They are parsed without SGLang, because SGLang may be missing or fail."""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from ..parser import between, whole
from ..policies.keys import json_type
from ..refusal import spell_flag
from ..upstream.server import attention_dp_size, draft_tokens, spell


def _flag(*spellings: str, kind: Callable[[str], Any] = str, default: Any = None) -> Any:
    """Return a dataclass field for a flag. `kind` converts the flag's value. A flag of kind `bool` has no value."""
    return field(default_factory=lambda: default, metadata={"spellings": spellings, "kind": kind})


def _read_object(text: str) -> dict[str, Any]:
    """Return the JSON object in the text of a flag."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object (got {text[:200]})")
    return found


@dataclass
class ServerFlags:
    """A server's flags. The policy's flags have the names of SGLang's arguments, so `read_arguments` can read them.

    - `names_model` is False if only the file of `--config` names the model.
    - `ranks` is the number of tensor-parallel ranks, and `ep_size` is the number of expert-parallel ranks among them.
    - `dp_size` is the number of data-parallel attention groups, or 1 without data-parallel attention.
    - `fraction` is the share of the GPU's memory for weights and KV cache. None means that SGLang chooses the share.
    - `slots` is the number of experts that a layer holds if experts are paged. None means that the number is not set.
    """

    names_model: bool = False
    model: str | None = _flag("--model-path", "--model")
    device: str | None = _flag("--device")
    config: str | None = _flag("--config")
    ranks: int = _flag("--tp-size", "--tensor-parallel-size", "--tp", kind=whole(), default=1)
    stages: int = _flag("--pp-size", "--pipeline-parallel-size", "--pp", kind=whole(), default=1)
    dp_size: int = _flag("--dp-size", "--data-parallel-size", "--dp", kind=whole(), default=1)
    attn_dp_size: int = _flag("--attn-dp-size", "--attention-data-parallel-size", kind=whole(), default=1)
    dp_attention: bool = _flag("--enable-dp-attention", kind=bool, default=False)
    ep_size: int = _flag("--ep-size", "--expert-parallel-size", "--ep", kind=whole())
    redundant: int = _flag("--ep-num-redundant-experts", kind=whole(0), default=0)
    moe_a2a_backend: str = _flag("--moe-a2a-backend", default="none")
    draft_tokens: int = _flag("--speculative-num-draft-tokens", kind=whole(), default=1)
    speculative_algorithm: str | None = _flag("--speculative-algorithm")
    speculative_adaptive: bool = _flag("--speculative-adaptive", kind=bool, default=False)
    enable_return_aux_hidden_states: bool = _flag("--enable-return-aux-hidden-states", kind=bool, default=False)
    cpu_offload_gb: int = _flag("--cpu-offload-gb", kind=whole(-1), default=0)
    offload_group_size: int = _flag("--offload-group-size", kind=whole(-1), default=-1)
    fraction: float | None = _flag("--mem-fraction-static", kind=between(0.001, 1))
    enable_paged_experts: bool = _flag("--enable-paged-experts", kind=bool, default=False)
    slots: int | None = _flag("--paged-experts-num-resident", kind=whole())
    changes: Mapping[str, Any] = _flag("--json-model-override-args", kind=_read_object, default={})
    quantization: str | None = _flag("--quantization")
    dtype: str = _flag("--dtype", default="auto")
    load_format: str = _flag("--load-format", default="auto")
    cache_dtype: str = _flag("--kv-cache-dtype", default="auto")
    revision: str | None = _flag("--revision")
    expert_policy: str | None = _flag("--expert-policy")
    expert_policy_config: str | None = _flag("--expert-policy-config")
    expert_policy_trace: str | None = _flag("--expert-policy-trace")
    expert_policy_on_disagreement: str | None = _flag("--expert-policy-on-disagreement")
    expert_policy_ignore_client_exact: bool = _flag("--expert-policy-ignore-client-exact", kind=bool, default=False)
    expert_policy_draft_depth: str | None = _flag("--expert-policy-draft-depth")
    mask_padding_experts: bool = _flag("--mask-padding-experts", kind=bool, default=False)

    @property
    def offloaded(self) -> bool:
        """Return whether SGLang keeps some weights outside the GPU (create_offloader in utils/offloader.py)."""
        return self.cpu_offload_gb > 0 or self.offload_group_size > 0

    @property
    def names_policy(self) -> bool:
        """Return whether the user has set a flag of the policy."""
        given = (value for name, value in vars(self).items() if name.startswith("expert_policy"))
        return any(value not in (None, False) for value in given)

    def resolve(self, config: Any) -> None:
        """Replace the values of the flags with the values that SGLang has resolved."""
        self.ranks, self.ep_size = config.tp_size, config.ep_size
        self.dp_size = attention_dp_size(config)
        self.moe_a2a_backend = spell(getattr(config, "moe_a2a_backend", None) or "none")
        self.draft_tokens = draft_tokens(config)
        self.speculative_adaptive = getattr(config, "speculative_adaptive", False)
        self.fraction = config.mem_fraction_static or self.fraction


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(re.sub(r"^argument ([^/:]*)[^:]*:", r"\1", message))


def read_flags(flags: Sequence[str]) -> ServerFlags:
    """Return the flags of the command line and of its `--config` file. Raises ValueError if a value is wrong."""
    if spelt := next((flag for flag in flags if flag.startswith("--config=")), None):
        raise ValueError(f"{spelt}: must be spelled --config FILE, because otherwise SGLang ignores the file")
    parser = _Parser(add_help=False, allow_abbrev=False)
    for one in fields(ServerFlags):
        if (kind := one.metadata.get("kind")) is not None:
            how: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind}
            parser.add_argument(*one.metadata["spellings"], dest=one.name, **how)
    alone, _ = parser.parse_known_args(flags, ServerFlags())
    given, _ = parser.parse_known_args([*_list_flags(_read_config(alone.config)), *flags], ServerFlags())
    given.names_model = alone.model is not None
    if given.ep_size is None:
        given.ep_size = 1 if given.moe_a2a_backend == "none" else given.ranks
    if given.ranks % given.ep_size:
        raise ValueError(f"--ep-size {given.ep_size}: must be a divisor of --tp-size {given.ranks}")
    flag = "--dp-size" if given.dp_attention and given.attn_dp_size == 1 else "--attn-dp-size"
    given.dp_size = given.dp_size if flag == "--dp-size" else given.attn_dp_size
    if given.ranks % given.dp_size:
        beside = " with --enable-dp-attention" if given.dp_attention else ""
        raise ValueError(f"{flag} {given.dp_size}: must be a divisor of --tp-size {given.ranks}{beside}")
    if not given.enable_paged_experts:
        given.slots = None
    if given.enable_return_aux_hidden_states:  # SGLang then does not speculate
        given.speculative_algorithm, given.draft_tokens = None, 1
    return given


def _read_config(file: str | None) -> dict[str, Any]:
    """Return the flags in the YAML file of `--config`, or {} without a file. Raises ValueError if the file is wrong."""
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
    except (OSError, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ValueError(f"{must} ({reason})") from None
    if not isinstance(found or {}, dict):
        raise ValueError(f"{must} (got a {json_type(found)})")
    return found or {}


def _list_flags(written: dict[str, Any]) -> Iterator[str]:
    """Yield the keys in the file of `--config` as flags of a command line."""
    for key, value in written.items():
        flag = spell_flag(str(key))
        if value is True:
            yield flag
        elif value is not None and value is not False:
            # YAML also has dates and bytes. SGLang writes them as text.
            yield f"{flag}={json.dumps(value, default=str) if isinstance(value, list | dict) else value}"
