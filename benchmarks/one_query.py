"""What one input and one query take: ``la(x)`` with its scores beside the encoder, ``cc.Retriever`` beside its search.

    python -m benchmarks.one_query [--rounds 2000]

A small convolutional network for images of 28 x 28, 64 dimensions, random weights, 50 classes; a gallery of 10,000
points. One thread, in turns; medians.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from statistics import median

import torch
from torch import nn

import contrastive_curvature as cc
from benchmarks.machine import describe, machine_line, table, take_turns

_POINTS, _HELD_OUT, _CLASSES = 10_000, 500, 50


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_query", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000, help="calls of each (default: 2000)")
    parser.add_argument("--points", type=int, default=_POINTS, help=f"of the gallery (default: {_POINTS:,})")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    encoder = nn.Sequential(
        nn.Conv2d(1, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 64)
    )
    centres = torch.randn(_CLASSES, 1, 28, 28)
    labels = torch.arange(options.points + _HELD_OUT) % _CLASSES
    x = centres[labels] + 0.6 * torch.randn(len(labels), 1, 28, 28)
    gallery, held_out = (x[:-_HELD_OUT], labels[:-_HELD_OUT]), (x[-_HELD_OUT:], labels[-_HELD_OUT:])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random weights may answer nothing
        retriever = cc.Retriever(encoder, 0.05, 0.1, 0.02).fit(*gallery, held_out=held_out)
    la, one = retriever.la, x[:1]
    assert la is not None
    points, query = retriever._gallery.directions, la(one).mu

    def scored() -> None:
        embedding = la(one)
        _ = embedding.uncertainty, embedding.p_value

    functions = {
        "the encoder": lambda: encoder(one),
        "`la(x).uncertainty`, `.p_value`": scored,
        f"a search of {options.points:,}": lambda: (query @ points.T).topk(10),
        "`retriever(x)`": lambda: retriever(one),
    }
    with torch.no_grad():
        seconds = take_turns(functions, options.rounds)
    print(machine_line(describe()))
    print(table(["one input", "ms"], [[name, f"{median(times) * 1e3:.3f}"] for name, times in seconds.items()]))


if __name__ == "__main__":
    main()
