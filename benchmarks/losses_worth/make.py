"""Train the encoders that only this comparison needs, and keep their feature files.

    python -m benchmarks.losses_worth.make --data-root data --cache runs/transfer

A feature file that is there is not made again.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.transfer.feature_file import save_features
from benchmarks.transfer.recipes.views_and_proxies import VIEWS_AND_PROXIES


def main() -> None:
    """Read the command line, and make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--cache", type=Path, default=Path("runs/transfer"))
    names = [recipe.name for recipe in VIEWS_AND_PROXIES]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for recipe in VIEWS_AND_PROXIES:
        path = given.cache / f"{recipe.name}{f'-seed{given.seed}' if given.seed else ''}.npz"
        if recipe.name not in given.only or path.is_file():
            continue
        start = time.perf_counter()
        save_features(path, recipe.make(given.data_root, given.cache, given.seed), half=True)
        print(f"{recipe.name}: made in {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
