"""The ``python`` blocks of a page run as a reader copies them, and print what the page says that they print."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["run_blocks"]

# The comments on the lines after a call of print: what it prints, or the beginning of it before " ...".
_SAID = re.compile(r"^ *print\(.*\n((?: *# .*(?:\n|$))+)", re.MULTILINE)


def run_blocks(page: Path, blocks: Iterable[tuple[int, str]], capsys: Any) -> None:
    """Run blocks, each with the number of lines above it, in one namespace."""
    namespace = {"__name__": "__main__"}
    for lines_above, code in blocks:
        # the empty lines make a traceback show the page's own line numbers
        exec(compile("\n" * lines_above + code, str(page), "exec"), namespace)
        printed = capsys.readouterr().out.splitlines()
        said = [line.strip().removeprefix("# ") for found in _SAID.findall(code) for line in found.splitlines()]
        for number, line in enumerate(said):
            if line.endswith(" ...") and number < len(printed):
                printed[number] = printed[number][: len(line) - 4] + " ..."
        assert not said or printed == said, "\n".join([f"{page.name} prints", *printed])
