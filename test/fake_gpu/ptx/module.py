"""A PTX module as Triton writes it: its one entry, parsed into instructions."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

TYPES = {
    **{f"{kind}{8 * size}": np.dtype(f"u{size}") for kind in "bu" for size in (1, 2, 4, 8)},
    **{f"s{8 * size}": np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
    "f32": np.dtype("f4"),
    "f64": np.dtype("f8"),
    "pred": np.dtype(bool),
}
"""PTX's types as numpy's; bf16 is handled where it is converted."""


@dataclass(frozen=True)
class Instruction:
    """`op` with its modifiers, as setp and (gt, s32); `guard` is the predicate it runs under."""

    text: str
    guard: str | None
    negated: bool
    op: str
    mods: tuple[str, ...]
    args: tuple[str, ...]

    @property
    def type(self) -> str:
        """The last modifier, where it is the type of the operands."""
        return self.mods[-1]


@dataclass
class Module:
    """`labels` are indices into `code`; `registers` have the type of each register or, with numbers, of each prefix."""

    name: str
    params: list[str]
    constants: dict[str, np.ndarray]
    shared: set[str]
    registers: dict[str, np.dtype] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)

    def type_of(self, register: str) -> np.dtype:
        """The type a register is declared with."""
        return self.registers.get(register) or self.registers[re.match(r"%[A-Za-z_]+", register)[0]]  # type: ignore


def parse(ptx: str) -> Module:
    """The module of a PTX text with one entry. Raises ValueError at what is not understood."""
    ptx = re.sub(r"//[^\n]*", "", ptx)
    entry = re.search(r"\.entry (\w+)\s*\((.*?)\)([^{]*)\{", ptx, re.S)
    if entry is None:
        raise ValueError("no entry in this PTX")
    constants = {}
    pattern = r"\.global \.align \d+ \.(\w+) (\w+)\[\d+\] = \{(.*?)\};"
    for kind, name, values in re.findall(pattern, ptx, re.S):
        constants[name] = np.array([int(value, 0) for value in values.split(",")], TYPES[kind])
    module = Module(
        entry[1],
        re.findall(r"(\w+)\s*(?:,|$)", re.sub(r"\s*\n\s*", "\n", entry[2].strip()), re.M),
        constants,
        set(re.findall(r"\.shared [^;]*?(\w+)\[\d*\]", ptx)),
    )
    for statement, scope in _split(ptx[entry.end() :]):
        _add(module, statement, scope)
    return module


def _split(body: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every statement with the scopes it is in, numbered: inline assembly has registers of its own in braces."""
    scopes: list[int] = []
    text, depth, serial = "", 0, 0
    for char in body:
        if char == "{" and not text.strip():
            serial += 1
            scopes.append(serial)
        elif char == "}" and depth == 0:
            if not scopes:
                return
            scopes.pop()
        elif char == ";":
            yield text.strip(), tuple(scopes)
            text = ""
        elif char == "\n" and (re.match(r"\s*\.(loc|file|pragma)\b", text) or re.match(r"\s*[\w$]+:\s*$", text)):
            if ":" in text:
                yield text.strip(), tuple(scopes)
            text = ""
        else:
            depth += (char == "{") - (char == "}")
            text += char


def _add(module: Module, statement: str, scopes: tuple[int, ...]) -> None:
    while label := re.match(r"([\w$]+):\s*", statement):
        module.labels[label[1]] = len(module.code)
        statement = statement[label.end() :]
    if declared := re.match(r"\.reg \.(\w+)\s+(.*)", statement, re.S):
        for name in (name.strip() for name in declared[2].split(",")):
            # A block %r<9> by its prefix; a name of inline assembly with its scope.
            local = name if name.startswith("%") else f"{name}@{scopes[-1] if scopes else 0}"
            module.registers[local.partition("<")[0]] = TYPES[declared[1]]
        return
    if not statement or statement.startswith("."):
        return

    def rename(match: re.Match[str]) -> str:
        names = (f"{match[0]}@{scope}" for scope in reversed(scopes))
        return next((name for name in names if name in module.registers), match[0])

    statement = re.sub(r"(?<![\w%.$@])[A-Za-z_]\w*(?!\w)", rename, statement)
    found = re.match(r"(?:@(!?)(\S+)\s+)?([\w.:]+)\s*(.*)", statement, re.S)
    if found is None:
        raise ValueError(f"PTX not understood: {statement}")
    op, *mods = found[3].split(".")
    args = tuple(" ".join(arg.split()) for arg in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", found[4]))
    module.code.append(Instruction(statement, found[2], bool(found[1]), op, tuple(mods), args))
