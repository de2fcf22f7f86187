"""What the strength of the prior moves, on the encoders of a finished run of ``benchmarks.experiments``.

The average information is multiplied by several strengths (the default is a hundredth), and the figures of table 2 are
computed again for every seed: no encoder is trained. AUROC and AUPRC are of ``novelty``, AUSC of ``uncertainty``; with
each strength the posterior is calibrated again, as in the run.

Run: ``python -m benchmarks.prior_scale RUN [RUN ...] --data-root ../shared/data --out FOLDER``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.default_prior import predict
from benchmarks.experiments.data import RetrievalData, Split, load_data
from benchmarks.experiments.finished import read_run
from benchmarks.experiments.methods.sampled import PosteriorMethod, draw_embeddings, read_features
from benchmarks.experiments.plan import COLUMNS, known_rows
from benchmarks.machine import describe, mean_and_deviation, write_results
from contrastive_curvature import metrics
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.laplace.prior import STRENGTH

RESULTS = Path(__file__).parent / "results"
STRENGTHS = (0.001, 0.01, 0.1, 1.0)
ROWS = ("laplace_posthoc", "laplace_online")
ANGLE = "auroc of 1/κ"
FIGURES = COLUMNS[2] | {ANGLE: "AUROC of 1/κ"}


def measure(
    method: PosteriorMethod, data: RetrievalData, others: dict[str, Split], n_votes: int, seed: int
) -> dict[str, dict[str, float]]:
    """Strength of the prior -> figure -> value, for one fitted posterior.

    Args:
        method: Fitted.
        data: Its data, with images out of distribution.
        others: Further images out of distribution, by title.
        n_votes: Sampled networks for the ECE.
        seed: Of them.
    """
    la, found = method.posterior, {}
    splits = [data.test, *([] if data.ood is None else [data.ood]), *others.values()]
    (z, phi), *parts = (read_features(la, method.setting, split) for split in splits)
    ranking = metrics.rank_by_labels(metrics.nearest_neighbors(z, k=10), data.test.targets)
    precision = metrics.average_precision_at_k(ranking, 1)
    for strength in STRENGTHS:
        la.optimize_prior_precision(strength=strength)
        method.calibrate(data)
        inside, outside, *further = (predict(la, mean, by) for mean, by in ((z, phi), *parts))
        votes = draw_embeddings(la, phi, n_votes, seed, method.setting.progress)
        found[f"{strength:g}"] = {f"map_at_{k}": metrics.map_at_k(ranking, k) for k in (1, 5, 10)} | {
            "auroc": metrics.auroc(inside.novelty, outside.novelty),
            "auprc": metrics.auprc(inside.novelty, outside.novelty),
            "ausc": metrics.ausc(inside.uncertainty, precision),
            "ece": metrics.retrieval_ece((u.cpu() for u in votes), data.test.targets),
            ANGLE: metrics.auroc(inside.tangential_variance, outside.tangential_variance),
        }
        for title, another in zip(others, further, strict=True):
            found[f"{strength:g}"][f"AUROC, {title}"] = metrics.auroc(inside.novelty, another.novelty)
    return found


def measure_run(run: Path, data_root: Path, outside: list[str], n_votes: int) -> dict[str, Any]:
    """All seeds of one run folder: row -> strength -> figure -> values."""
    made = read_run(run, data_root)
    if made.config["table"] != 2:
        raise InputError(expected(str(run), "a run of table 2", f"one of table {made.config['table']}"))
    others = {other.title: other.test for other in (load_data(name, data_root, ood="none") for name in outside)}
    found: dict[str, Any] = {}
    for key in ROWS:
        for seed in tqdm(made.seeds(key), desc=key):
            method = made.load(key, seed)
            assert isinstance(method, PosteriorMethod)
            for strength, figures in measure(method, made.data, others, n_votes, seed).items():
                for name, value in figures.items():
                    found.setdefault(key, {}).setdefault(strength, {}).setdefault(name, []).append(value)
    return {"config": made.config, "rows": found}


def render(result: dict[str, Any]) -> str:
    """The measurement as Markdown."""
    machine = result["machine"]
    lines = [
        "# The strength of the prior",
        "",
        f"`python -m benchmarks.prior_scale` on {machine['cpu']}, torch {machine['torch']}, {machine['date']}: "
        f"encoders of `benchmarks.experiments --table 2`, {result['votes']} votes for the ECE. Strength: times the "
        f"average information; the default is {STRENGTH:g}. Mean ± standard deviation over seeds, test images.",
    ]
    titles = {row.key: row.title for row in known_rows(2)}
    for run in result["runs"]:
        config = run["config"]
        images = "all" if config["train_size"] is None else f"{config['train_size']:,}"
        head = f"{config['data']}, dimension {config['dim']}, {images} training images, {config['epochs']} epochs"
        names = list(next(iter(next(iter(run["rows"].values())).values())))
        columns = [FIGURES.get(name, name) for name in names]
        lines += ["", f"## {head}", "", "| | strength | " + " | ".join(columns) + " | seeds |"]
        lines.append("|---|---:|" + "---:|" * (len(columns) + 1))
        for key, strengths in run["rows"].items():
            for strength, figures in strengths.items():
                cells = " | ".join(mean_and_deviation(figures[name]) for name in names)
                lines.append(f"| {titles[key]} | {strength} | {cells} | {len(figures['auroc'])} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Measure and write ``prior_scale.json`` and ``prior_scale.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of table 2")
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--outside", nargs="+", default=[], metavar="DATA", help="test images that are unknown too")
    parser.add_argument("--votes", type=int, default=50)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(argv)
    machine = describe()
    runs = [measure_run(run, given.data_root, given.outside, given.votes) for run in given.runs]
    result = {"script": "python -m benchmarks.prior_scale", "machine": machine, "votes": given.votes, "runs": runs}
    write_results(given.out, "prior_scale", result, render(result))


if __name__ == "__main__":
    main()
