"""The server's own flags, as far as weights, memory and the estimate need them: read without SGLang."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any, NoReturn

from ..console import LARGEST, read_count
from ..files import read_server_file
from ..hooks import FLAGS as FLAGS_OF_OURS
from ..patching.errors import PatchError
from ..patching.tree import find_tree
from ..policies.keys import suggest

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
    "policy_config": ("--expert-policy-config",),
}
SWITCHES = {"dp_attention": "--enable-dp-attention", "paged": "--enable-paged-experts"}


@dataclass(frozen=True)
class ServerFlags:
    """What a server is asked for: `policy` spelt as `--expert-policy` takes it, with its `policy_config`, and those
    `dropped` for it, as SGLang takes the last one; `fraction` of the GPU's memory for weights and KV cache, None where
    SGLang chooses; `ranks` of tensor parallelism, over which `ep_size` expert-parallel ranks and `dp_size` groups of
    data-parallel attention (1 without it) divide them. `stages` of a pipeline; `paged` where experts are paged in,
    `offloaded` where other weights may be.
    """

    model: str | None
    device: str | None
    policy: str | None
    dropped: tuple[str, ...]
    policy_config: str | None
    ranks: int
    stages: int
    dp_size: int
    ep_size: int
    redundant: int
    draft_tokens: int
    fraction: float | None
    paged: bool
    offloaded: bool

    def resolve(self, config: Any) -> ServerFlags:
        """The same as SGLang has resolved it."""
        attention = config.dp_size if config.enable_dp_attention else 1
        return replace(
            self,
            ranks=config.tp_size,
            dp_size=attention,
            ep_size=config.ep_size,
            draft_tokens=config.speculative_num_draft_tokens or 1,
            fraction=config.mem_fraction_static or self.fraction,
        )


def check_known(words: Sequence[str]) -> None:
    """Raise ValueError for a flag that is nowhere in SGLang's sources, which its own parser would tell after seconds of
    imports. Not beside plugins, which may add flags.
    """
    stray = words[0] if words and not words[0].startswith("-") else None
    if stray is not None:
        raise ValueError(f"unrecognized arguments: {stray}; allowed are flags, such as --model {stray}")
    try:
        root = find_tree().root / "sglang" / "srt"
    except (PatchError, ModuleNotFoundError):
        return
    files = [root / "server_args.py", *root.glob("arg_groups/**/*.py")]
    text = "\n".join(file.read_text() for file in files)
    fields = [*re.findall(r"^    (\w+): ", text, re.MULTILINE), *FLAGS_OF_OURS]
    known = {*re.findall(r"--([\w-]+)", text), *(name.replace("_", "-") for name in fields)}
    for flag in (word[2:].partition("=")[0] for word in words if word.startswith("--")):
        spellings = flag, flag.removeprefix("no-")
        if not any(name.startswith(spellings) for name in known) and not entry_points(group="sglang.srt.plugins"):
            near = suggest(flag, sorted(known), "--")
            raise ValueError(f"unrecognized arguments: --{flag}{near}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def read_flags(flags: Sequence[str]) -> ServerFlags:
    """Of the command line, and of the file that `--config` names. Raises ValueError, one line, for a value that is
    none, and ranks that do not divide each other.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name, spellings in FLAGS.items():
        parser.add_argument(*spellings, dest=name)
    for name, spelling in SWITCHES.items():
        parser.add_argument(spelling, dest=name, action="store_true")
    parser.add_argument("--expert-policy", action="append", default=[])
    given = parser.parse_known_args(flags)[0]
    written = {str(key).replace("_", "-"): value for key, value in read_server_file(given.config).items()}

    def find(name: str) -> Any:
        """The command line's; else the file's."""
        if name in SWITCHES:
            return getattr(given, name) or bool(written.get(SWITCHES[name][2:]))
        told = (written.get(spelling[2:]) for spelling in FLAGS[name])
        return getattr(given, name) or next((value for value in told if value is not None), None)

    def count(name: str, low: int = 1) -> int:
        value = find(name)
        return low if value is None else read_count(FLAGS[name][0], value, low)

    tp_size, ep_size, dp_size = count("tp_size"), count("ep_size"), count("dp_size")
    if find("moe_a2a_backend") not in (None, "none") and find("ep_size") is None:
        ep_size = tp_size
    if tp_size % ep_size:
        raise ValueError(f"--ep-size {ep_size}: allowed is a divisor of --tp-size {tp_size}")
    if find("dp_attention") and tp_size % dp_size:
        raise ValueError(f"--dp-size {dp_size}: allowed with --enable-dp-attention is a divisor of --tp-size {tp_size}")
    fraction = find("fraction")
    return ServerFlags(
        model=find("model"),
        device=find("device"),
        policy=given.expert_policy[-1] if given.expert_policy else written.get("expert-policy"),
        dropped=tuple(text for text in given.expert_policy[:-1] if text != given.expert_policy[-1]),
        policy_config=find("policy_config"),
        ranks=tp_size,
        stages=count("pp_size"),
        dp_size=dp_size if find("dp_attention") else 1,
        ep_size=ep_size,
        redundant=count("ep_num_redundant_experts", 0),
        draft_tokens=count("draft_tokens"),
        fraction=None if fraction is None else read_number("--mem-fraction-static", fraction, 0.001, 1),
        paged=find("paged"),
        offloaded=find("offloaded") not in (None, 0, "0"),
    )


def read_number(flag: str, text: Any, low: float, high: float = LARGEST) -> float:
    """A number of a flag. Raises ValueError with what is allowed."""
    try:
        number = float(str(text))
    except ValueError:
        number = math.nan
    if not low <= number <= high:
        raise ValueError(f"{flag} {text}: allowed is a number of {low:g} to {high:,}")
    return number
