"""Server arguments, parsed and resolved by SGLang itself, with every refusal noted in place of the first one raised."""

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from typing import Any

from rich.text import Text

from ..compatibility.arguments import Arguments
from ..compatibility.checks import GIVEN, RESOLVED, find_refusals, set_arguments
from ..compatibility.start import Start
from ..gpus import Gpu
from .pretend import pretend


class Resolution:
    """What came of a server's arguments.

    `refusals` are (who refuses, its one line), in the order in which a server would come to them; `warnings` likewise.
    `server_args` is SGLang's record, None where it came to none, `finished` whether SGLang resolved all of it;
    `arguments` are the stage's, None where it is off.
    """

    def __init__(self) -> None:
        self.refusals: list[tuple[str, str]] = []
        self.warnings: list[tuple[str, str]] = []
        self.start: Start | None = None
        self.finished = False
        self.fault: Exception | None = None
        """Of a check of ours, and no refusal."""

    @property
    def server_args(self) -> Any:
        return self.start and self.start.server_args

    @property
    def arguments(self) -> Arguments | None:
        return self.start.arguments if self.start and self.start.parsed else None

    def refuse(self, who: str, error: object) -> None:
        """Note a refusal once."""
        entry = who, _flatten(str(error)) or type(error).__name__
        if entry not in self.refusals:
            self.refusals.append(entry)

    def note_given(self, server_args: Any) -> None:
        """In place of `hooks.check_flags`, which SGLang calls before it resolves."""
        self.start = Start(server_args)
        self._note(self.start, GIVEN)

    def note_resolved(self, server_args: Any) -> None:
        """In place of `hooks.check_server`, which SGLang calls after it has resolved the same record."""
        assert self.start is not None
        assert self.start.server_args is server_args
        self.finished = True
        self._note(self.start, RESOLVED)

    def _note(self, start: Start, when: str) -> None:
        try:
            for error in find_refusals(start, when):
                self.refuse("sglang-xshare", error)
            if when == GIVEN:
                set_arguments(start)
        except OSError:  # of a file or a repository that SGLang misses as well
            raise
        except Exception as error:
            self.fault = error
            raise


def resolve(flags: Sequence[str], gpu: Gpu | None) -> Resolution:
    """Parse and resolve a server's flags, here or as if on `gpu`. Raises ValueError for an unknown GPU or flag."""
    from sglang.srt import expert_policy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 0.5.17 warns that there is no GPU as it is imported
        from sglang.srt.server_args import prepare_server_args

    resolution = Resolution()
    hooks = {"check_flags": resolution.note_given, "check_server": resolution.note_resolved}
    upstream = {name: getattr(expert_policy, name) for name in hooks}
    said = io.StringIO()
    try:
        vars(expert_policy).update(hooks)
        machine = pretend(gpu) if gpu else nullcontext()
        with _listening(resolution.warnings), redirect_stdout(said), redirect_stderr(said), machine:
            _resolve(flags, prepare_server_args, resolution)
    except SystemExit:
        # argparse has printed its usage, which for SGLang is some hundred lines, and at the end what is wrong.
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


def _flatten(text: str) -> str:
    """One line, without the terminal's colours, which some of SGLang's warnings carry."""
    return " ".join(Text.from_ansi(text).plain.split())


@contextmanager
def _listening(lines: list[tuple[str, str]]) -> Iterator[None]:
    """Within it warnings of SGLang and of the stage go to `lines` and nowhere else, each once."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            who = "sglang-xshare" if record.name.startswith("sglang_xshare") else "SGLang"
            line = who, _flatten(record.getMessage())
            if line not in lines:
                lines.append(line)

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
