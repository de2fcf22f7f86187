"""The ``python`` blocks of a page run as a reader copies them, and print what the page says that they print."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["run_blocks", "sections"]

Blocks = list[tuple[int, str]]

# The comments on the lines after a call of print: what it prints, or the beginning of it before " ...".
_SAID = re.compile(r"^ *print\(.*\n((?: *# .*(?:\n|$))+)", re.MULTILINE)


def sections(page: Path) -> dict[str, Blocks]:
    """Return the ``python`` blocks with the number of lines above each, by section; "" is the beginning."""
    text, found = page.read_text(encoding="utf-8"), dict[str, Blocks]()
    title = ""
    for match in re.finditer(r"^## ([^\n]*)|^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        title = match[1] or title
        if match[2]:
            found.setdefault(title, []).append((text.count("\n", 0, match.start(2)), match[2]))
    return found


def run_blocks(page: Path, blocks: Iterable[tuple[int, str]], capsys: Any, names: dict[str, Any] | None = None) -> None:
    """Run blocks, each with the number of lines above it, in one namespace, that of earlier blocks if ``names`` is."""
    namespace = {} if names is None else names
    namespace["__name__"] = "__main__"
    for lines_above, code in blocks:
        # the empty lines make a traceback show the page's own line numbers
        exec(compile("\n" * lines_above + code, str(page), "exec"), namespace)
        printed = capsys.readouterr().out.splitlines()
        said = [line.strip().removeprefix("# ") for found in _SAID.findall(code) for line in found.splitlines()]
        for number, line in enumerate(said):
            if line.endswith(" ...") and number < len(printed):
                printed[number] = printed[number][: len(line) - 4] + " ..."
        assert not said or printed == said, "\n".join([f"{page.name} prints", *printed])
