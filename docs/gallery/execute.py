"""Run the gallery's scripts, and write each beside itself as a notebook with its figures.

Run, in the repository's root: ``python docs/gallery/execute.py`` for all pages, with names such as ``digits faces`` for
some. A script that fails leaves its old notebook as it is.

``digits``, ``two_towers`` and ``curvature`` need the data that come with scikit-learn. ``text`` reads
``clinc150/data_full.json.gz`` (https://github.com/clinc/oos-eval, CC BY 3.0) from ``DATA_ROOT``, by default
``../shared/data``. ``faces`` reads ``faces.npz``, which ``python -m benchmarks.transfer`` writes, from
``FEATURES_ROOT``, by default ``../cache/transfer``, and thumbnails from torchvision's ``lfw-py`` in ``DATA_ROOT``.
The pictures of people are shown as thumbnails only, and are for research.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

from contrastive_curvature.artifact import write_whole

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGES = ("digits", "faces", "text", "two_towers", "curvature")
MOST_BYTES = 400_000
"""The site and the repository stay small: fewer or smaller figures, if a page is larger."""


def execute(script: Path) -> nbformat.NotebookNode:
    """The script as a notebook, executed in the repository's root."""
    notebook = jupytext.read(script)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    resources = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=1800, coalesce_streams=True, resources=resources).execute()
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # jupytext draws them at random
        cell.metadata.pop("execution", None)  # the time of day, which would change with every run
    return notebook


def main(names: list[str]) -> None:
    unknown = sorted(set(names) - set(PAGES))
    if unknown:
        sys.exit(f"no such page: {', '.join(unknown)}; expected some of {', '.join(PAGES)}")
    os.environ.pop("GALLERY_SMALL", None)
    # Of a dependency that uses torch.jit at its import, and of tqdm without widgets.
    os.environ["PYTHONWARNINGS"] = "ignore::FutureWarning,ignore:IProgress not found"
    os.environ["MATPLOTLIBRC"] = str(HERE / "matplotlibrc")
    os.environ["PYTHONPATH"] = str(ROOT)  # two pages use readers of benchmarks/
    for name in names or PAGES:
        page = nbformat.writes(execute(HERE / f"{name}.py")).encode() + b"\n"
        if len(page) > MOST_BYTES:
            sys.exit(f"{name}: {len(page):,} bytes, more than {MOST_BYTES:,}; make its figures smaller")
        write_whole(HERE / f"{name}.ipynb", lambda file, page=page: file.write(page))
        print(f"{name}.ipynb: {len(page):,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
