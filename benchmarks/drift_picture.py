"""The picture of docs/tasks/drift.md: evidence over time, of the monitors that the code of that page makes.

python -m benchmarks.drift_picture [--out docs/images/drift.png]
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.style import COLOURS, GREY, finish, subplots

DOCS = Path(__file__).parent.parent / "docs"
OUT = DOCS / "images" / "drift.png"


def draw(monitors: dict[float, Any]) -> Figure:
    """Draw one line for each strength of the noise, up to twelve powers of ten."""
    figure, (axes,) = subplots(7, 3.6)
    for (noise, monitor), colour in zip(monitors.items(), (GREY, *COLOURS[:4]), strict=True):
        axes.plot(monitor.log10_evidence, color=colour, label=f"noise {noise}")
    axes.axhline(2, color="black", linewidth=1, linestyle=":")
    axes.text(0, 2.2, "alarm: evidence 1 / delta = 100", fontsize=9)
    axes.set(xlabel="inputs; the noise begins at 300", ylabel="evidence, powers of ten", ylim=(-2, 12))
    finish(axes, columns=5)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drift_picture", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="default: %(default)s")
    out: Path = parser.parse_args(arguments).out
    code = re.search(r"^```py\n(.*?)^```$", (DOCS / "tasks" / "drift.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert code
    page: dict[str, Any] = {}
    exec(code[1], page)
    draw(page["monitors"]).savefig(out, dpi=130)


if __name__ == "__main__":
    main()
