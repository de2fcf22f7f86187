"""What the device can do, and what the library's main kernels reach of it.

Measured in the same run: the bandwidth of a copy within the device's memory (bytes read and written), and the
floating-point operations per second of a matrix product in every dtype (float32 in full, without TF32). Against them
the kernels whose operations and bytes have a closed form, for N points, D dimensions, F features and M sampled
negatives:

- pair sums inside a margin, for all pairs: ``2 N^2 D`` for the cosines, ``2 N^2 (D + 1)`` for the sums;
- the same against a sample of C classes: ``2 N M (2 D + 1) (1 + 1 / C)``, since those of a point's own class are
  subtracted;
- last-layer diagonal ``m^T (phi o phi)``: ``2 N D F``, bytes of ``phi`` and ``m`` read once.

Run: ``python -m benchmarks.gpu.rates [--device cuda] [--quick] [--out FOLDER]``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import contrastive_curvature as cc
from benchmarks.machine import describe, machine_line, measure_time, options, table, write_results
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.losses.contrastive import InsideColumns
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.last_layer import LastLayerPullback

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
_MARGIN = 0.7
_CLASSES = 10
_TURNS = 7

Rates = dict[str, float]


def median_seconds(function: Callable[[], object], device: str) -> float:
    """Of several calls after two that are not counted."""
    measure_time(function, 2, device)
    return measure_time(function, _TURNS, device)["median_seconds"]


def measure_ceilings(device: str, quick: bool) -> Rates:
    """Bytes per second of a copy as ``bandwidth``, and operations per second of a matrix product by dtype."""
    source = torch.randn(2**18 if quick else 2**28, device=device)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), device)
    rates = {"bandwidth": 2 * source.numel() * source.element_size() / seconds}
    for dtype, size in ((torch.float64, 4096), (torch.float32, 8192), (torch.bfloat16, 8192)):
        n = 256 if quick else size
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        rates[name_of(dtype)] = 2 * n**3 / median_seconds(lambda a=a, b=b: a @ b, device)
    return rates


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kernels(device: str, dtype: torch.dtype, quick: bool) -> dict[str, tuple[Callable[[], object], float, float]]:
    """Calls with their operations and their least bytes."""
    n_pairs, n_sampled, n_layer = (512, 1024, 256) if quick else (32_768, 262_144, 65_536)
    dim, samples, width = (8, 64, 32) if quick else (128, 2_000, 2_048)
    size = torch.finfo(dtype).bits // 8
    generator = torch.Generator().manual_seed(0)

    def draw(n: int, columns: int) -> Tensor:
        return torch.randn(n, columns, generator=generator).to(device, dtype)

    def labels_of(n: int) -> Tensor:
        return (torch.arange(n) % _CLASSES).to(device)

    loss = cc.ContrastiveLoss(_MARGIN)
    z, labels = draw(n_pairs, dim), labels_of(n_pairs)
    u, _ = normalize(draw(n_sampled, dim))
    shares = torch.ones(_CLASSES, dtype=dtype, device=device)
    bank = InsideColumns(u[:samples], labels_of(samples), shares, 1 - _MARGIN**2 / 2)
    layer = nn.Linear(width, dim).to(device, dtype).requires_grad_(False)
    phi = draw(n_layer, width)
    attracted = _only_positives(draw(n_layer, dim))
    pullback = LastLayerPullback(Encoder(layer, phi[:2]))
    return {
        f"pair sums, N = {n_pairs:,}, D = {dim}": (
            lambda: loss.output_hessian(z, labels),
            2 * n_pairs**2 * (2 * dim + 1),
            size * n_pairs * dim,
        ),
        f"sampled sums, N = {n_sampled:,}, M = {samples:,}, D = {dim}": (
            lambda: bank.sums(u, labels_of(len(u))),
            2 * n_sampled * samples * (2 * dim + 1) * (1 + 1 / _CLASSES),
            size * n_sampled * dim + 8 * n_sampled * (dim + 1),
        ),
        f"last-layer diagonal, N = {n_layer:,}, D = {dim}, F = {width:,}": (
            lambda: pullback.coupled_diag(phi, attracted),
            2 * n_layer * dim * width,
            size * n_layer * (dim + width),
        ),
    }


def _only_positives(z: Tensor) -> Any:
    """A Hessian whose pair sums take no time: all points are of one class."""
    return cc.ContrastiveLoss(margin=None).output_hessian(z, torch.zeros(len(z), dtype=torch.int64, device=z.device))


def fractions_of(flop: float, moved: float, seconds: float, rates: Rates, dtype: str = "float32") -> dict[str, float]:
    """Reached shares of the measured rates, and of the floor that both set together."""
    floor = max(flop / rates[dtype], moved / rates["bandwidth"])
    return {
        "flop": flop,
        "bytes": moved,
        "seconds": seconds,
        "of_flops": flop / seconds / rates[dtype],
        "of_bandwidth": moved / seconds / rates["bandwidth"],
        "of_floor": floor / seconds,
    }


def render(result: dict[str, Any]) -> str:
    """The measurement as Markdown."""
    rates = result["rates"]
    products = ", ".join(f"{rates[name] / 1e12:,.2f} TFLOP/s in {name}" for name in ("float64", "float32", "bfloat16"))
    text = (
        f"`python -m benchmarks.gpu.rates` on {machine_line(result['machine'])}. A copy moves "
        f"{rates['bandwidth'] / 1e9:,.0f} GB/s, read and written; a matrix product makes {products}."
    )
    rows = [
        [row["kernel"], row["dtype"], f"{1e3 * row['seconds']:.2f}"]
        + [f"{row[key]:.1%}" for key in ("of_flops", "of_bandwidth", "of_floor")]
        for row in result["kernels"]
    ]
    made = table(["kernel", "dtype", "ms", "of FLOP/s", "of bandwidth", "of the floor"], rows)
    return f"# Rates of the device, and what the kernels reach\n\n{text}\n\n{made}\n"


def main(argv: list[str] | None = None) -> None:
    """Measure and write ``rates.json`` and ``rates.md``."""
    parser = options(__doc__, RESULTS)
    parser.set_defaults(device="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes; the figures mean nothing")
    given = parser.parse_args(argv)
    torch.backends.cuda.matmul.allow_tf32 = False
    rates = measure_ceilings(given.device, given.quick)
    rows = []
    for dtype in (torch.float32, torch.float64):
        for name, (call, flop, moved) in kernels(given.device, dtype, given.quick).items():
            shares = fractions_of(flop, moved, median_seconds(call, given.device), rates, name_of(dtype))
            rows.append({"kernel": name, "dtype": name_of(dtype), **shares})
    result = {"machine": describe(given.device), "quick": given.quick, "rates": rates, "kernels": rows}
    write_results(given.out, "rates", result, render(result))


if __name__ == "__main__":
    main()
