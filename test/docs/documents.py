"""The documents, and what they show: commands, links and paths."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt  # comes with rich
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
# The changelog tells of commands that were; they need not be.
SILENT = ("CHANGELOG.md",)
SHELLS = ("", "sh", "bash")
"""Languages of a fenced block that holds commands: none is named, or a shell."""
INLINE = re.compile(
    r"(\w+=\S+ )*(make|python|pip|pytest|sglang|sglang-xshare|curl|\.venv/bin/\S+|scripts/\S+\.(sh|py)) \S"
)
"""What inline code starts with where it is a command and not a name."""
CONTEXT = re.compile(r"export (\w+=\S+ ?)+|\w+=(\S*|\"[^\"]*\")")
"""Lines that set variables for those below them."""
COMMENT = re.compile(r"(?P<quoted>'[^']*'|\"[^\"]*\")|(^|\s)#(\s.*)?$")
ACTIVATE = ". .venv/bin/activate"
PLACE = re.compile(
    r"(python|test|benchmark|docs|scripts|examples|patches|training|checkpoints|sgl-kernel|policies|selection|stage|"
    r"patching)/[\w./-]*"
)
"""Inline code that is a path of the checkout, or of the package."""


@dataclass(frozen=True)
class Command:
    """One command of a document, without comments and continuations; `context` sets the variables above it."""

    text: str
    context: tuple[str, ...]
    document: str


def list_documents(root: Path = ROOT) -> list[Path]:
    """Every tracked page."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "*.md"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.split()
    return [root / name for name in sorted(names) if (root / name).exists()]


def read_commands(document: Path, root: Path = ROOT) -> list[Command]:
    """The commands of a page, in order."""
    name = str(document.relative_to(root))
    context: list[str] = []
    commands = []
    for text in _list_lines(document.read_text()):
        if CONTEXT.fullmatch(text):
            context.append(text)
        elif text != ACTIVATE:
            commands += [Command(part, tuple(context), name) for part in text.split(" && ")]
    return commands


def list_commands(root: Path = ROOT) -> list[Command]:
    """The commands of all pages that show what to run now."""
    pages = [page for page in list_documents(root) if page.name not in SILENT]
    return [command for page in pages for command in read_commands(page, root)]


def list_links(document: Path) -> list[str]:
    """The targets of a page's links and pictures, without those of the web and without anchors."""
    tokens = _list_tokens(document.read_text())
    targets = [str(token.attrs.get("href") or token.attrs.get("src") or "") for token in tokens]
    return [target.partition("#")[0] for target in targets if target and not re.match(r"\w+:|#", target)]


def list_paths(document: Path) -> list[str]:
    """Paths of the checkout that a page names in inline code."""
    return [
        token.content.partition("::")[0]
        for token in _list_tokens(document.read_text())
        if token.type == "code_inline" and PLACE.fullmatch(token.content.partition("::")[0])
    ]


def _list_lines(text: str) -> Iterator[str]:
    """Every command line of a page: of its blocks, and inline code that is one."""
    for token in _list_tokens(text):
        if token.type == "code_block" or (token.type == "fence" and token.info.strip() in SHELLS):
            for line in token.content.replace("\\\n", " ").splitlines():
                plain = " ".join(COMMENT.sub(lambda match: match["quoted"] or "", line).split())
                if plain:
                    yield plain
        elif token.type == "code_inline" and INLINE.match(token.content):
            yield " ".join(token.content.split())


def _list_tokens(text: str) -> list[Token]:
    tokens = MarkdownIt("commonmark").enable("table").parse(re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL))
    return [one for token in tokens for one in (token.children or [token])]
