"""Server arguments, parsed and resolved by SGLang itself, with all refusals instead of the first; and the report."""

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
from ..gpus import Gpu
from ..policies.description import describe as describe_plan
from ..refusal import ExpertPolicyError
from ..upstream.server import model_config, spell
from .blocks import explain_cut
from .pretend import pretend

Line = tuple[str, str]
"""(the program that refuses or warns, SGLang or sglang-xshare; its text, one line)."""


@dataclass
class Resolution:
    """The outcome for a server's arguments.

    `refusals` and `warnings` are in a server's own order. `start` has SGLang's record of arguments, None before SGLang
    has one; `finished` is True if SGLang resolved all of them. `fault` is an unexpected error of one of our checks.
    """

    refusals: list[Line] = field(default_factory=list)
    warnings: list[Line] = field(default_factory=list)
    start: Start | None = None
    finished: bool = False
    fault: Exception | None = None

    def refuse(self, who: str, error: object) -> None:
        """Note a refusal once."""
        _note(self.refusals, who, str(error).strip() or type(error).__name__)

    def note_given(self, server_args: Any) -> None:
        """Stand in for `hooks.check_flags`, which SGLang calls before it resolves."""
        self.start = Start(server_args)
        self._check(self.start, GIVEN)

    def note_resolved(self, server_args: Any) -> None:
        """Stand in for `hooks.check_server`, which SGLang calls after it has resolved the same record."""
        assert self.start is not None
        self.finished = True
        self._check(self.start, RESOLVED)
        reason = explain_cut(model_config(server_args), self.start.config)
        if reason is not None and "ranks" not in self.start.refused:  # "ranks" has refused the same cut
            self.refuse("SGLang", reason)

    def _check(self, start: Start, when: str) -> None:
        try:
            for error in find_refusals(start, when):
                self.refuse("sglang-xshare", error)
            if when == GIVEN:
                set_arguments(start)
        except OSError:  # a missing file or repository, which SGLang itself reports too
            raise
        except Exception as error:
            self.fault = error
            raise


def resolve(flags: Sequence[str], gpu: Gpu | None) -> Resolution:
    """Parse and resolve a server's flags, here or as if on `gpu`. Raises ValueError for flags that SGLang rejects."""
    from sglang.srt import expert_policy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at its import, 0.5.17 warns that there is no GPU
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
        # argparse has printed SGLang's usage, some hundred lines; the last line is the error.
        *_, line = ["", *said.getvalue().splitlines()]
        raise ValueError(line.partition("error: ")[2] or f"SGLang: {line}") from None
    finally:
        vars(expert_policy).update(upstream)
    return resolution


def _resolve(flags: Sequence[str], prepare: Callable[[list[str]], Any], resolution: Resolution) -> None:
    try:
        server_args = prepare(list(flags))
        if hasattr(server_args, "resolve_once"):  # from 0.5.20 on, parsing does not resolve
            server_args.resolve_once()
    except Exception as error:  # whatever SGLang raises would end the server
        if error is resolution.fault:
            raise
        resolution.refuse("SGLang", error)


def _note(lines: list[Line], who: str, text: str) -> None:
    """Add `text` once, without the terminal's colours, which some of SGLang's warnings carry."""
    line = who, " ".join(Text.from_ansi(text).plain.split())
    if line not in lines:
        lines.append(line)


@contextmanager
def _listening(lines: list[Line]) -> Iterator[None]:
    """Add the warnings of SGLang and of the stage to `lines` instead of the log, each once."""

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
    """Return the report for JSON, without the parts that SGLang could not resolve."""
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
