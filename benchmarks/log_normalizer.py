"""The log-normaliser of the von Mises-Fisher distribution, beside the two quadratics that a source document fits to it.

Kirchhof et al. (2022) replace ``log C_D(kappa)`` by a quadratic for D = 128 (Eq. 12) and 512 (Eq. 13), fitted for kappa
from 10 to 50. Tabulated are the exact value, the difference (fit minus exact), and the ratio of the derivatives, which
is what training sees: 1 where the fit is right.

Run: ``python -m benchmarks.log_normalizer [--out FOLDER] [--plots FOLDER]``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import write_results
from contrastive_curvature import vmf

__all__ = ["DIMS", "FITTED", "KAPPAS", "compare", "draw", "markdown"]

DIMS = (128, 512)
KAPPAS = (1.0, 3.0, 10.0, 30.0, 50.0, 70.0, 100.0, 140.0, 200.0, 500.0, 1e3, 1e4)
FITTED = (10.0, 50.0)
"""Where the document fits."""
_RESULTS = Path(__file__).parent / "results"
_POINTS = 400


def compare(kappa: Tensor, dim: int) -> dict[str, Tensor]:
    """Exact and fitted values.

    Args:
        kappa: Concentrations above 0, float64, shape (N,).
        dim: 128 or 512.

    Returns:
        ``exact`` and ``fit``, in nats; ``difference``, the second minus the first; ``derivatives``, the ratio of those
        of the second to those of the first; each (N,).
    """
    k = kappa.clone().requires_grad_()
    exact, fit = vmf.log_normalizer(k, dim), vmf.log_normalizer_quadratic(k, dim)
    of_exact, of_fit = (torch.autograd.grad(value.sum(), k)[0] for value in (exact, fit))
    exact, fit = exact.detach(), fit.detach()
    return {"exact": exact, "fit": fit, "difference": fit - exact, "derivatives": of_fit / of_exact}


def markdown(found: dict[str, Any]) -> str:
    """The table of both dimensions."""
    heads = [f"D = {dim}: log C | fit − log C | derivatives, fit / exact" for dim in found["dims"]]
    out = [
        "# The log-normaliser of the von Mises-Fisher distribution and its quadratic fits",
        "",
        "`python -m benchmarks.log_normalizer`. log C_D(κ), exact, beside Eq. 12 and 13 of the document, which are "
        f"fitted for κ from {found['fitted'][0]:g} to {found['fitted'][1]:g} (bold). In nats.",
        "",
        f"| κ | {' | '.join(heads)} |",
        "|---:" * (1 + 3 * len(heads)) + "|",
    ]
    for at, kappa in enumerate(found["kappa"]):
        cells = []
        for dim in found["dims"]:
            one = {name: values[at] for name, values in found[str(dim)].items()}
            cells += [f"{one['exact']:,.2f}", _signed(one["difference"]), f"{one['derivatives']:.3g}"]
        inside = found["fitted"][0] <= kappa <= found["fitted"][1]
        shown = f"**{kappa:,.0f}**" if inside else f"{kappa:,.0f}"
        out.append(f"| {shown} | {' | '.join(cells)} |".replace("-", "−"))
    return "\n".join(out) + "\n"


def _signed(value: float) -> str:
    """Two digits at least, all of those before the point."""
    return f"{value:+,.0f}" if abs(value) >= 100 else f"{value:+.2g}"


def draw(folder: Path) -> Path:
    """Plot the exact values and the fits: the fitted range above, and far beyond it below.

    Args:
        folder: Made if need be.

    Returns:
        ``FOLDER/log_normalizer.png``.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(DIMS), figsize=(9, 6.5), squeeze=False, layout="constrained")
    for column, dim in enumerate(DIMS):
        low, high = FITTED
        for axis, top in ((axes[0, column], 1.4 * high), (axes[1, column], 1000.0)):
            kappa = torch.linspace(1e-3, top, _POINTS, dtype=torch.float64)
            found = compare(kappa, dim)
            axis.axvspan(low, high, color="0.9", label="fitted range")
            axis.plot(kappa, found["exact"], label="exact")
            axis.plot(kappa, found["fit"], "--", label=f"quadratic (Eq. {12 + column})")
            axis.set(xlabel="concentration κ", ylabel=f"log C for D = {dim} (nats)", xlim=(0, top))
        axes[0, column].legend()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "log_normalizer.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def main(arguments: list[str] | None = None) -> None:
    """Write the table as JSON and Markdown, and the plot where a folder is given for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder for log_normalizer.json and .md")
    parser.add_argument("--plots", type=Path, help="folder for log_normalizer.png (default: no plot)")
    given = parser.parse_args(arguments)
    found: dict[str, Any] = {"dims": list(DIMS), "fitted": list(FITTED), "kappa": list(KAPPAS)}
    for dim in DIMS:
        values = compare(torch.tensor(KAPPAS, dtype=torch.float64), dim)
        found[str(dim)] = {name: value.tolist() for name, value in values.items()}
    write_results(given.out, "log_normalizer", found, markdown(found))
    if given.plots is not None:
        print(draw(given.plots))


if __name__ == "__main__":
    main()
