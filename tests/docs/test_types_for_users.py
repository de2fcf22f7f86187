"""The examples of the README and of the ten-minute start pass a user's strict mypy, with the settings that we advise.

A user's program is checked as strictly as mypy can; laplace-torch's types are taken as they come (``docs/faq.md`` says
why). The package's own modules are read with the project's settings, so that the cache of ``make typecheck`` serves:
without it, mypy reads torch anew, which takes more than a minute.
"""

import re
import subprocess
import sys
from pathlib import Path

from markdown_pages import ROOT, tokens

PAGES = ("README.md", "docs/quickstart.md", "docs/decide.md")
STRICTER = "# mypy: warn-return-any, disallow-subclassing-any\n"
"""What the project's settings leave out of mypy's strict mode, for its own sake."""


def code_of(page: str) -> str:
    """All Python blocks of a page as one program."""
    found = tokens((ROOT / page).read_text(encoding="utf-8"))
    return "\n\n".join(token.content for token in found if token.type == "fence" and token.info.strip() == "python")


def check(*programs: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", *map(str, programs)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)


def test_examples_pass_strict_mypy(tmp_path):
    programs = []
    for number, page in enumerate(PAGES):
        code = code_of(page)
        assert "Laplace(" in code
        programs.append(tmp_path / f"page_{number}.py")
        programs[-1].write_text(STRICTER + code, encoding="utf-8")
    # Each mistake is one that our annotations must show; an Any in their place would hide it.
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        STRICTER + "import torch\n"
        "import contrastive_curvature as cc\n"
        "def use(embedding: cc.EmbeddingDistribution) -> str:\n"
        "    return embedding.uncertainty\n"
        "cc.SupConLoss('warm')\n"
        "cc.metrics.auroc(1)\n",
        encoding="utf-8",
    )
    found = check(*programs, wrong)
    errors = [line for line in found.stdout.splitlines() if ": error: " in line]
    assert [line for line in errors if "wrong.py" not in line] == [], found.stdout
    lines = [int(match[1]) for line in errors if (match := re.search(r"wrong\.py:(\d+): error", line))]
    assert set(lines) == {5, 6, 7}, found.stdout
