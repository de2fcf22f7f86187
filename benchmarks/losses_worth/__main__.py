"""``python -m benchmarks.losses_worth``: judge every feature file whose training loss is known, one after the other."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.losses_worth.encoder import read_encoder, training_loss
from benchmarks.losses_worth.judge import judge
from benchmarks.losses_worth.numbers import rounded
from benchmarks.losses_worth.table import markdown
from benchmarks.machine import describe, write_results
from benchmarks.transfer.script import chosen_files, file_options, results_of_others
from contrastive_curvature.errors import ContrastiveCurvatureError

NAME = "losses_worth"


def main(argv: Sequence[str] | None = None) -> int:
    """Judge the chosen feature files, and keep what there is after each of them.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        Exit status: 0, or 2 when a file was refused.
    """
    parser = file_options(__doc__)
    given = parser.parse_args(argv)
    machine = describe()
    paths = chosen_files(parser, given)
    if given.only is None:
        paths = [path for path in paths if training_loss(path.stem) is not None]
    results = results_of_others(given, NAME)
    for path in paths:
        try:
            results[path.stem] = rounded(judge(read_encoder(path)))
        except ContrastiveCurvatureError as error:
            print(f"error: {path.stem}: {error}", file=sys.stderr)
            return 2
        results = dict(sorted(results.items()))
        write_results(given.out, NAME, {"machine": machine, "encoders": results}, markdown(results, machine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
