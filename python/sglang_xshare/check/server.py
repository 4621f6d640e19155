"""What a server is asked for, as far as weights, memory and the estimate need it: where SGLang does not resolve its
arguments here, or is not installed, these need no more than a dozen of its flags.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from ..files import read_server_file
from ..parser import read_count, read_number

FLAGS: dict[str, tuple[str, ...]] = {
    "model": ("--model-path", "--model"),
    "device": ("--device",),
    "config": ("--config",),
    "tp_size": ("--tp-size", "--tensor-parallel-size", "--tp"),
    "pp_size": ("--pp-size", "--pipeline-parallel-size", "--pp"),
    "dp_size": ("--dp-size", "--data-parallel-size", "--dp"),
    "ep_size": ("--ep-size", "--expert-parallel-size", "--ep"),
    "ep_num_redundant_experts": ("--ep-num-redundant-experts",),
    "moe_a2a_backend": ("--moe-a2a-backend",),
    "draft_tokens": ("--speculative-num-draft-tokens",),
    "offloaded": ("--cpu-offload-gb",),
    "fraction": ("--mem-fraction-static",),
    "slots": ("--paged-experts-num-resident",),
    "policy": ("--expert-policy",),
    "policy_config": ("--expert-policy-config",),
}
SWITCHES = {"dp_attention": "--enable-dp-attention", "paged": "--enable-paged-experts"}


@dataclass(frozen=True)
class ServerFlags:
    """What a server is asked for: `policy` spelt as `--expert-policy` takes it, with its `policy_config`; `fraction` of
    the GPU's memory for weights and KV cache, None where SGLang chooses; `ranks` of tensor parallelism, over which
    `ep_size` expert-parallel ranks and `dp_size` groups of data-parallel attention (1 without it) divide them. `stages`
    of a pipeline; `paged` where experts are paged into `slots` of each layer, None where no number is given;
    `offloaded` where other weights may be.
    """

    model: str | None
    device: str | None
    policy: str | None
    policy_config: str | None
    ranks: int
    stages: int
    dp_size: int
    ep_size: int
    redundant: int
    draft_tokens: int
    fraction: float | None
    paged: bool
    slots: int | None
    offloaded: bool

    def resolve(self, config: Any) -> ServerFlags:
        """The same as SGLang has resolved it."""
        return replace(
            self,
            ranks=config.tp_size,
            dp_size=config.dp_size if config.enable_dp_attention else 1,
            ep_size=config.ep_size,
            draft_tokens=config.speculative_num_draft_tokens or 1,
            fraction=config.mem_fraction_static or self.fraction,
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def read_flags(flags: Sequence[str]) -> ServerFlags:
    """Of the command line and its `--config`. Raises ValueError, one line, for wrong values and ranks."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name, spellings in FLAGS.items():
        parser.add_argument(*spellings, dest=name)
    for name, spelling in SWITCHES.items():
        parser.add_argument(spelling, dest=name, action="store_true")
    file = parser.parse_known_args(flags)[0].config
    given = parser.parse_known_args([*_list_flags(read_server_file(file)), *flags])[0]

    def count(name: str, low: int = 1) -> int:
        value = getattr(given, name)
        return low if value is None else read_count(FLAGS[name][0], value, low)

    tp_size, ep_size, dp_size = count("tp_size"), count("ep_size"), count("dp_size")
    if given.moe_a2a_backend not in (None, "none") and given.ep_size is None:
        ep_size = tp_size
    if tp_size % ep_size:
        raise ValueError(f"--ep-size {ep_size}: allowed is a divisor of --tp-size {tp_size}")
    if given.dp_attention and tp_size % dp_size:
        raise ValueError(f"--dp-size {dp_size}: allowed with --enable-dp-attention is a divisor of --tp-size {tp_size}")
    return ServerFlags(
        model=given.model,
        device=given.device,
        policy=given.policy,
        policy_config=given.policy_config,
        ranks=tp_size,
        stages=count("pp_size"),
        dp_size=dp_size if given.dp_attention else 1,
        ep_size=ep_size,
        redundant=count("ep_num_redundant_experts", 0),
        draft_tokens=count("draft_tokens"),
        fraction=None if given.fraction is None else read_number("--mem-fraction-static", given.fraction, 0.001, 1),
        paged=given.paged,
        slots=count("slots") if given.paged and given.slots is not None else None,
        offloaded=given.offloaded not in (None, "0"),
    )


def _list_flags(written: dict[str, Any]) -> Iterator[str]:
    """The keys of a server's `--config` as its command line would have them."""
    for key, value in written.items():
        flag = f"--{str(key).replace('_', '-')}"
        if value is True:
            yield flag
        elif value is not None and value is not False:
            yield f"{flag}={value if isinstance(value, str) else json.dumps(value)}"
