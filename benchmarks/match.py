"""What the probability of a match costs: for pairs by the kind of their spreads, and beside a search.

Pairs: ``MatchProbability.same``, beside the variances of the angles from dense matrices in float64, which take longer
than anything else that it needs. Search: an exact index of FAISS; time of the index, and of the probabilities of every
hit. Both in one process, one thread; seconds are of
processor time. The embeddings are random.

    python -m benchmarks.match [--quick]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.nn.functional import normalize

import contrastive_curvature as cc
from benchmarks.machine import Case, machine_line, measure_cases, measure_time, table
from contrastive_curvature.embedding.spread import Axes, Dense, Diagonal, Spread

DIM, K, BLOCK = 128, 10, 250
KINDS = ("diagonal", "axes", "dense")


def embeddings(mean: Tensor, kind: str, generator: torch.Generator) -> cc.EmbeddingDistribution:
    """Embeddings whose standard deviations are about a tenth of a norm."""
    n, dim = mean.shape
    values, axes = (
        torch.rand(n, dim, generator=generator),
        torch.linalg.qr(torch.randn(dim, dim, generator=generator))[0],
    )
    spread: Spread = Diagonal(0.01 / dim * values)
    if kind == "axes":
        spread = Axes(axes, 0.01 / dim * values, 0.01 / dim * torch.eye(dim), torch.float32)
    if kind == "dense":
        root = torch.randn(n, dim, dim, generator=generator)
        spread = Dense(root @ root.mT * (0.01 / dim**2))
    return cc.EmbeddingDistribution.trusted(mean, spread)


def pairs(n: int, kind: str) -> tuple[cc.EmbeddingDistribution, cc.EmbeddingDistribution, Tensor]:
    """Pairs of unit embeddings, half of which are near each other."""
    generator = torch.Generator().manual_seed(0)
    one, other = normalize(torch.randn(2, n, DIM, generator=generator), dim=2)
    same = torch.arange(n) % 2 == 0
    other = torch.where(same[:, None], one + 0.7 * other, other)
    return embeddings(one, kind, generator), embeddings(other, kind, generator), same


def dense_variance(a: cc.EmbeddingDistribution, b: cc.EmbeddingDistribution) -> Tensor:
    """Variances of the directions of ``a`` on the way to ``b``, from matrices, to the first order in the spread."""
    out = []
    for first in range(0, len(a), BLOCK):
        z, towards = a.raw_mean[first : first + BLOCK].double(), b.mu[first : first + BLOCK].double()
        spread = a[first : first + BLOCK].covariance.double() / z.square().sum(1)[:, None, None]
        u = normalize(z, dim=1)
        across = torch.eye(DIM, dtype=u.dtype) - u.unsqueeze(2) * u.unsqueeze(1)
        way = normalize((across @ towards.unsqueeze(2)).squeeze(2), dim=1).unsqueeze(1)
        out.append((way @ (across @ spread @ across) @ way.mT).flatten())
    return torch.cat(out)


def of_pairs(n: int, kind: str) -> Case:
    """Seconds for n pairs."""
    a, b, same = pairs(n, kind)
    match = cc.MatchProbability().fit_pairs(a, b, same)
    ours = measure_time(lambda: match.same(a, b), 5)["cpu_seconds"]
    dense = measure_time(lambda: (dense_variance(a, b), dense_variance(b, a)), 1)["cpu_seconds"]
    return {"seconds": ours, "dense_seconds": dense, "ratio": dense / ours}


def of_search(n: int, size: int, kind: str) -> Case:
    """Seconds for n queries among ``size`` embeddings."""
    import faiss

    faiss.omp_set_num_threads(1)
    asked, near, same = pairs(n, kind)
    generator = torch.Generator().manual_seed(1)
    vectors = normalize(torch.randn(size, DIM, generator=generator), dim=1)
    vectors[:n] = near.mu
    number = torch.rand(2, size, generator=generator) + 0.1
    stored = cc.StoredEmbeddings(vectors, 100 * number[0], number[1])
    index = faiss.IndexFlatIP(DIM)
    index.add(vectors.numpy())
    match = cc.MatchProbability().fit_pairs(asked, cc.StoredEmbeddings.of(near), same)
    found: list[Tensor] = []
    searched = measure_time(lambda: found.append(cc.FaissIndex(index).search(asked.mu, K)[1]), 1)["cpu_seconds"]
    hits = found[0]
    return {
        "index": searched,
        "same": measure_time(lambda: [match.same(asked, stored[rank]) for rank in hits.T], 1)["cpu_seconds"],
    }


def cases(given: argparse.Namespace) -> list[Case]:
    """Pairs of every kind, then searches."""
    n, queries, size = (60, 40, 200) if given.quick else (6000, 10_000, 1_000_000)
    out: list[Case] = [{"what": "pairs", "kind": kind, "n": n, "threads": 1} for kind in KINDS]
    return [*out, {"what": "search", "kind": "axes", "n": queries, "size": size, "threads": 1}]


def measure(case: Case) -> Case:
    """One case."""
    if case["what"] == "pairs":
        return of_pairs(case["n"], case["kind"])
    return of_search(case["n"], case["size"], case["kind"])


def render(results: Case) -> str:
    """Two tables."""
    of = {what: [case for case in results["cases"] if case["what"] == what] for what in ("pairs", "search")}
    rows = [
        [c["kind"], f"{c['n']:,}", f"{c['seconds']:.2f}", f"{c['dense_seconds']:.1f}", f"{c['ratio']:.0f}"]
        for c in of["pairs"]
    ]
    out = [
        "# The probability of a match",
        "",
        f"`python -m benchmarks.match`, {machine_line(results['machine'])}; one thread, {DIM} dimensions, seconds of "
        "processor time. Dense: the variances of the angles alone, from matrices in float64.",
        "",
        table(("spreads", "pairs", "`same`, s", "dense, s", "ratio"), rows),
    ]
    for c in of["search"]:
        cells = [f"{c['index']:.1f}", f"{c['same']:.1f}", f"{c['same'] / c['index']:.2f}"]
        out += ["", f"{c['n']:,} queries ({c['kind']}), {K} hits each among {c['size']:,}, exact index of FAISS:", ""]
        out.append(table(("search, s", "every hit, s", "probabilities / search"), [cells]))
    return "\n".join(out) + "\n"


def main(arguments: list[str] | None = None) -> None:
    measure_cases("match", __doc__, cases, measure, render, arguments)


if __name__ == "__main__":
    main()
