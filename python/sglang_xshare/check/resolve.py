"""The arguments of a server as SGLang resolves them, with all refusals and warnings."""

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from ..compatibility.architectures import EXECUTED
from ..compatibility.checks import GIVEN, RESOLVED, Start, find_refusals, set_arguments
from ..compatibility.experts import Experts, read_experts
from ..gpus import Gpu
from ..policies.description import describe as describe_plan
from ..refusal import ExpertPolicyError
from ..upstream.server import model_config, spell
from .blocks import explain_cut
from .pretend import pretend

Line = tuple[str, str]
"""The program that refuses or warns (SGLang or sglang-xshare), and its message in one line."""


@dataclass
class Resolution:
    """The result of resolving a server's arguments.

    `refusals` and `warnings` have the order in which the server would report them. `start` contains SGLang's
    `ServerArgs`. It is None until SGLang has created them. `finished` is True if SGLang resolved all arguments.
    `experts` is then the result of `read_experts`. `fault` is an unexpected error in one of our checks.
    """

    refusals: list[Line] = field(default_factory=list)
    warnings: list[Line] = field(default_factory=list)
    start: Start | None = None
    finished: bool = False
    experts: Experts | None = None
    fault: Exception | None = None

    def refuse(self, who: str, error: object) -> None:
        """Add a refusal, unless it is already in the list."""
        _note(self.refusals, who, str(error).strip() or type(error).__name__)

    def note_given(self, server_args: Any) -> None:
        """Run the checks of the given arguments. SGLang calls this method instead of `hooks.check_flags`."""
        self.start = Start(server_args)
        self._check(self.start, GIVEN)

    def note_resolved(self, server_args: Any) -> None:
        """Run the checks of the resolved arguments. SGLang calls this method instead of `hooks.check_server`."""
        assert self.start is not None
        self.finished, self.experts = True, read_experts(server_args)
        self._check(self.start, RESOLVED)
        reason = explain_cut(model_config(server_args), self.start.config)
        if reason is not None and "ranks" not in self.start.refused:  # the check "ranks" finds the same error
            self.refuse("SGLang", reason)

    def _check(self, start: Start, when: str) -> None:
        try:
            for error in find_refusals(start, when):
                self.refuse("sglang-xshare", error)
            if when == GIVEN:
                set_arguments(start)
        except OSError:  # a file or repository is missing, which SGLang itself also reports
            raise
        except Exception as error:
            self.fault = error
            raise


def resolve(flags: Sequence[str], gpu: Gpu | None) -> Resolution:
    """Parse and resolve a server's flags as if this machine had the GPU.

    If `gpu` is None, resolve the flags for this machine. Raises ValueError if SGLang's parser rejects the flags.
    """
    from sglang.srt import expert_policy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang 0.5.17 warns at import that there is no GPU
        from sglang.srt.server_args import prepare_server_args

    resolution, said = Resolution(), io.StringIO()
    hooks = {"check_flags": resolution.note_given, "check_server": resolution.note_resolved}
    upstream = {name: getattr(expert_policy, name) for name in hooks}
    machine = pretend(gpu) if gpu else nullcontext()
    try:
        vars(expert_policy).update(hooks)
        with _listening(resolution.warnings), redirect_stdout(said), redirect_stderr(said), machine:
            _resolve(flags, prepare_server_args, resolution)
    except SystemExit:
        # argparse has printed SGLang's usage, which has hundreds of lines. The last line is the error.
        *_, line = ["", *said.getvalue().splitlines()]
        raise ValueError(line.partition("error: ")[2] or f"SGLang: {line}") from None
    finally:
        vars(expert_policy).update(upstream)
    return resolution


def _resolve(flags: Sequence[str], prepare: Callable[[list[str]], Any], resolution: Resolution) -> None:
    try:
        server_args = prepare(list(flags))
        if hasattr(server_args, "resolve_once"):  # since 0.5.20, parsing does not resolve the arguments
            server_args.resolve_once()
    except Exception as error:  # any error that SGLang raises would end the server
        if error is resolution.fault:
            raise
        resolution.refuse("SGLang", error)


def _note(lines: list[Line], who: str, text: str) -> None:
    """Add a message, unless the list already contains it. Remove terminal colors, which some warnings have."""
    line = who, " ".join(Text.from_ansi(text).plain.split())
    if line not in lines:
        lines.append(line)


@contextmanager
def _listening(lines: list[Line]) -> Iterator[None]:
    """Collect the warnings of SGLang and of this package in `lines` instead of the log. Keep each warning once."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            who = "sglang-xshare" if record.name.startswith("sglang_xshare") else "SGLang"
            _note(lines, who, record.getMessage())

    loggers = [logging.getLogger(name) for name in ("sglang", "sglang_xshare")]
    listener = Listener(logging.WARNING)
    for logger in loggers:
        logger.addHandler(listener)
        logger.propagate = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger in loggers:
            logger.removeHandler(listener)
            logger.propagate = True


def describe(resolution: Resolution) -> dict[str, Any]:
    """Return the report as an object for JSON. Parts that SGLang could not resolve are missing."""
    report: dict[str, Any] = {"served": not resolution.refusals}
    for name, lines in (("refusals", resolution.refusals), ("warnings", resolution.warnings)):
        report[name] = [{"by": who, "says": says} for who, says in lines]
    start = resolution.start
    if start is None or not resolution.finished:
        return report
    report |= {"device": str(start.config.device), "moe_runner": spell(start.config.moe_runner_backend)}
    try:
        model = start.model
    except ExpertPolicyError:
        return report
    report["model"] = {
        "architecture": model.architecture,
        "executed_as": EXECUTED.get(model.architecture),
        "layers": model.num_layers,
        "experts": model.num_experts,
        "top_k": model.top_k,
    }
    if start.arguments.schedule is not None:
        report["plan"] = describe_plan(start.arguments.schedule, model.top_k)
    return report
