"""What may be done with a command that a document shows."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Run:
    """Run it with words replaced and arguments appended; it ends with `status`, and its output has `shows`, a pattern.

    A target of make is run as its last line, without what it needs first: the environment that runs the test. In all
    texts `{scratch}` is a fresh folder and `{tree}` an unpatched SGLang that the test may patch.
    """

    replace: Mapping[str, str] = field(default_factory=dict)
    more: str = ""
    shows: str = ""
    status: int = 0
    is_long: bool = False


@dataclass(frozen=True)
class Serve:
    """Start it, have it answer a batch, run every `Ask` of it, stop it."""

    replace: Mapping[str, str] = field(default_factory=dict)
    more: str = ""
    is_long: bool = True


@dataclass(frozen=True)
class Ask:
    """Run it against the server that another documented command has started, whose port it gets for 30000."""

    server: str
    more: str = ""
    shows: str = ""


@dataclass(frozen=True)
class Parse:
    """SGLang's own parser takes its flags, and ours the policy: its model is too large to be here."""


@dataclass(frozen=True)
class Same:
    """It is what a target of make runs last, which another entry runs."""

    target: str


@dataclass(frozen=True)
class Elsewhere:
    """A file below `test/` runs it and names it; `reason` says why this test does not."""

    where: str
    reason: str
