"""More Python to learn from: documented functions of the interpreter's own standard library.

The library is under the PSF licence, and every machine that runs the recipe has it. Modules that
the held-out rows come from are left out, and so is any function whose text is among those rows.
"""

from __future__ import annotations

import ast
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from paceline.deploy.recipes.data import Row

_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib-dynload"}
PROMPT = "Please generate code based on the following doc:\n{doc}"


def module_of(row_id: str) -> str | None:
    """The module of a row id such as ``cpython313-email.utils:formatdate:12``, else None."""
    source, dash, rest = row_id.partition("-")
    return rest.split(":")[0] if dash and source.startswith(("cpython", "stdlib")) else None


def library_rows(
    held_out: Sequence[Row],
    known: Sequence[Row] = (),
    *,
    root: Path | None = None,
    min_functions: int = 8,
) -> list[Row]:
    """Documented functions of the standard library as rows of topic ``code``.

    Args:
        held_out: rows that must never be learnt, neither their modules nor their texts.
        known: rows that are trained on already; their texts are not taken twice.
        root: the library's folder; default the running interpreter's.
        min_functions: leave out small modules that are in neither list. A held-out list may be
            a sample, and a module of one or two functions may be missing from it by chance.

    Returns:
        Rows in the order of module name and line.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    banned = {module_of(row.id) for row in held_out}
    # Packages split as one: `zipfile.__init__` held out bans the older `zipfile` module too.
    banned |= {name.removesuffix(".__init__") for name in banned if name}
    trained = {module_of(row.id) for row in known}
    texts = {_squeeze(row.response) for row in (*held_out, *known)}
    prompts = {_squeeze(row.prompt) for row in held_out}
    found = [row for path in sorted(_files(root)) for row in _functions(path, root)]
    sizes = Counter(module_of(row.id) for row in found)
    rows = []
    for row in found:
        module = module_of(row.id)
        if _is_banned(module, banned) or (module not in trained and sizes[module] < min_functions):
            continue
        text = _squeeze(row.response)
        if text not in texts and _squeeze(row.prompt) not in prompts:
            texts.add(text)
            rows.append(row)
    return rows


def _is_banned(module: str | None, banned: Collection[str | None]) -> bool:
    return module is None or module in banned or module.removesuffix(".__init__") in banned


def _squeeze(text: str) -> str:
    return " ".join(text.split())


def _files(root: Path) -> Iterator[Path]:
    for path in root.rglob("*.py"):
        if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts[:-1]):
            yield path


def _functions(path: Path, root: Path) -> Iterator[Row]:
    module = ".".join(path.relative_to(root).with_suffix("").parts)
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError):
        return  # the library carries a few files that are broken on purpose
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc and len(node.body) > 1:
                text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                yield Row(
                    f"stdlib-{module}:{node.name}:{node.lineno}",
                    "code",
                    PROMPT.format(doc=doc),
                    text,
                )
