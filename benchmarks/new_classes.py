"""How many queries of classes that nobody knows are answered, where so many are asked for? By the limit's source.

    python -m benchmarks.new_classes [--choices 5] [--sets digits ...] [--newton]

Classes are chosen at random that neither the head, nor the gallery, nor the held-out queries have; their queries judge.
The frozen outputs are pixels and counts of letters, and ``head=True`` trains on them. Characters, functions and names
are made here from what Python packages ship; none of the four sets had a say in the rules that it judges.
``--newton`` asks instead whether the curvature of the last layer tells how many queries of unseen classes are answered.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.util
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from laplace import Laplace
from numpy.typing import NDArray
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from sklearn.feature_extraction.text import HashingVectorizer
from torch import nn
from torch.nn.functional import normalize

import contrastive_curvature as cc
from benchmarks.machine import table
from contrastive_curvature.retriever.encoding import embedded, fitted_posterior
from contrastive_curvature.retriever.evidence import COLUMNS, Embedded, Searched, evidence
from contrastive_curvature.retriever.head import with_head
from contrastive_curvature.retriever.rule import certified
from contrastive_curvature.retriever.state import coded

Numbers = NDArray[np.float32]
Labels = NDArray[np.int64]
_LEAST, _MOST = 40, 90
"""Points of a class."""
_SEARCH = 4
"""Columns of the evidence that come from a search."""

PACKAGES = """
PIL accelerate babel bs4 click fsspec haystack hypothesis jedi jinja2 joblib jsonschema laplace lightning markdown
matplotlib mistune mkdocs mypy networkx nltk numpy onnx openai packaging pandas parso prompt_toolkit pydantic pygments
pyparsing pytest requests rich scipy sklearn sqlalchemy stochman sympy tenacity torchmetrics torchvision tornado
transformers typer urllib3 wcwidth yaml
"""


def digits() -> tuple[Numbers, Labels]:
    """Return scikit-learn's digits: 10 classes."""
    x, y = load_digits(return_X_y=True)
    return (x / 16).astype("float32"), y


def characters(each: int = 60) -> tuple[Numbers, Labels]:
    """Return letters and digits in Matplotlib's fonts, turned, sheared and noisy: 36 classes, 16 x 16 pixels."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    random, x, y = np.random.default_rng(0), [], []
    kinds = "DejaVuSans[.-]|DejaVuSansMono|DejaVuSerif[.-]|STIXGeneral|cmb|cmr|cmss|cmt"
    fonts = [
        str(path)
        for path in sorted(Path(matplotlib.get_data_path(), "fonts", "ttf").iterdir())
        if re.match(kinds, path.name)
    ]
    for k, character in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"):
        for _ in range(each):
            image = Image.new("L", (48, 48))
            font = ImageFont.truetype(str(random.choice(fonts)), int(random.integers(24, 36)))
            ImageDraw.Draw(image).text(random.integers(20, 29, 2), character, 255, font, anchor="mm")
            shear = random.normal(scale=0.15, size=2)
            turned = image.rotate(random.normal(scale=8)).transform(
                (48, 48), Image.Transform.AFFINE, (1, shear[0], -24 * shear[0], shear[1], 1, -24 * shear[1])
            )
            small = np.asarray(turned.resize((16, 16), Image.Resampling.BILINEAR), "float32") / 255
            x.append((small + 0.1 * random.normal(size=small.shape)).astype("float32").ravel())
            y.append(k)
    return np.stack(x), np.array(y)


def _hashed(texts: Sequence[str], classes: Sequence[int]) -> tuple[Numbers, Labels]:
    """Return counts of letters, pairs and triples, hashed, of at most so many texts of a class."""
    y = np.array(classes)
    order = np.random.default_rng(0).permutation(len(y))
    kept = np.sort(np.concatenate([order[y[order] == k][:_MOST] for k in np.unique(y)]))
    hashing = HashingVectorizer(analyzer="char", ngram_range=(1, 3), n_features=512, alternate_sign=True)
    return hashing.transform([texts[k] for k in kept]).toarray().astype("float32"), y[kept]


def functions() -> tuple[Numbers, Labels]:
    """Return functions of Python packages that are installed with this project: the class is the package."""
    texts, classes = [], []
    for k, name in enumerate(re.findall(r"\w+", PACKAGES)):
        spec = importlib.util.find_spec(name)
        files = sorted(Path(spec.origin).parent.rglob("*.py"))[:25] if spec and spec.origin else []
        for path in files:
            source = path.read_text(errors="ignore")
            lines = source.splitlines()
            found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
            parts = ["\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in found[:20]]
            parts = [part for part in parts if 300 < len(part) < 3000]
            texts += parts
            classes += [k] * len(parts)
    x, y = _hashed(texts, classes)
    enough = np.bincount(y)[y] >= _LEAST
    return x[enough], y[enough]


def names() -> tuple[Numbers, Labels]:
    """Return names of countries, languages and currencies, three in a text, from Babel: the class is the language."""
    from babel import Locale, localedata

    random, texts, classes = np.random.default_rng(0), [], []
    plain = [name for name in localedata.locale_identifiers() if "_" not in name]
    for k, name in enumerate(random.permutation(plain)[:150]):
        locale = Locale.parse(str(name))
        words = sorted(
            {str(word) for part in (locale.territories, locale.languages, locale.currencies) for word in part.values()}
        )
        if len(words) < 3 * _MOST:
            continue
        order = random.permutation(len(words))[: 3 * _MOST].reshape(-1, 3)
        texts += [", ".join(words[j] for j in row) for row in order]
        classes += [k] * len(order)
    return _hashed(texts, classes)


class Kind(NamedTuple):
    """A data set, and how many of its classes are never seen."""

    read: Callable[[], tuple[Numbers, Labels]]
    unseen: int


SETS = {
    "digits": Kind(digits, 2),
    "characters": Kind(characters, 12),
    "functions": Kind(functions, 12),
    "names": Kind(names, 20),
}


class Split(NamedTuple):
    """Inputs and labels: trained on and searched, held out, tested; and queries of classes that nobody knows.

    ``extra`` are queries of further such classes, which the user held out.
    """

    train: tuple[Numbers, Labels]
    held: tuple[Numbers, Labels]
    test: tuple[Numbers, Labels]
    unseen: tuple[Numbers, Labels]
    extra: tuple[Numbers, Labels]


def splits(x: Numbers, y: Labels, unseen: int, choices: int) -> Iterator[Split]:
    """Yield thirds of the points of known classes, and all points of the others, for random choices of classes."""
    for seed in range(choices):
        random = np.random.default_rng(seed)
        order = random.permutation(np.unique(y))
        new, more = np.isin(y, order[:unseen]), np.isin(y, order[unseen : 3 * unseen // 2])
        part = random.permutation(len(y)) % 3
        thirds = (~new & ~more & (part == k) for k in range(3))
        yield Split(*((x[rows], y[rows]) for rows in (*thirds, new, more)))


def above(found: Searched) -> Searched:
    """Return what the search of the head's outputs alone says."""
    return replace(found, below=None, same=None)


def unchanged(found: Searched) -> Searched:
    return found


def supcon(x: Numbers, y: Labels) -> nn.Module:
    """Train an encoder of one's own, all of it on these classes."""
    torch.manual_seed(0)
    encoder, loss = nn.Sequential(nn.Linear(x.shape[1], 128), nn.ReLU(), nn.Linear(128, 32)), cc.SupConLoss(0.1)
    optimizer = torch.optim.Adam(encoder.parameters(), 2e-3)
    labels = torch.from_numpy(y)
    for _ in range(60):
        rows = torch.randperm(len(x))[:500]
        optimizer.zero_grad()
        loss(encoder(torch.from_numpy(x[rows.numpy()])), labels[rows]).backward()
        optimizer.step()
    return encoder


def heads(split: Split, rate: float) -> Iterator[tuple[str, cc.Retriever, Callable[[Searched], Searched]]]:
    """Yield retrievers with a head: what limits them, and what of a search they look at."""
    raw, names = torch.from_numpy(split.train[0]), split.train[1].tolist()
    model = with_head(None, raw, coded((), names)[1])
    la = fitted_posterior(model, model.inputs(raw), names, progress_bar=False)[0]

    def fitted(encoder: Any, **options: Any) -> cc.Retriever:
        given = {"gallery": split.train} if encoder is la else dict(zip("xy", split.train, strict=True))
        return cc.Retriever(encoder, None, rate, None, **options).fit(held_out=split.held, **given)

    head = fitted(la)
    state = head._now
    held, absent = state.compared(state.held, state.truth, None)
    taken_out = copy.copy(head)
    taken_out._state = replace(state, rule=certified(state.rates, above(held), above(absent)))
    yield "head: taken out", taken_out, above
    yield "below", head, lambda found: replace(found, same=None)
    yield "below, same class", head, unchanged
    yield "the same, by class", fitted(la, by_class=True), unchanged
    yield "as `head=True` chooses", fitted(None, head=True), unchanged


def trained(split: Split, rate: float) -> Iterator[tuple[str, cc.Retriever, Callable[[Searched], Searched]]]:
    """Yield retrievers of an encoder of one's own, all of it trained on all known classes."""
    encoder = supcon(*split.train)
    for name, given in {
        "taken out": {},
        "train=": {"train": supcon},
        "new_classes=": {"new_classes": split.extra},
    }.items():
        fitted = cc.Retriever(encoder, None, rate, None).fit(*split.train, held_out=split.held, **given)
        yield f"trained: {name}", fitted, unchanged


def shares(split: Split, rate: float) -> dict[str, tuple[float, float]]:
    """Return the shares of queries of unseen and of known classes that are answered, by the source of the limit."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, retriever, look in (*heads(split, rate), *trained(split, rate)):
            state = retriever._now
            first, second = (
                float(
                    (
                        state.rule.decision(look(state.searched(embedded(state.posterior, x, "x"), None)[0]))
                        == "answer"
                    ).mean()
                )
                for x, _ in (split.unseen, split.test)
            )
            found[name] = first, second
    return found


def without_parts(split: Split, rate: float, parts: int = 4) -> dict[str, float]:
    """Return shares that are answered under the limit of classes taken out, and what a Newton step says of them.

    Each quarter of the classes is taken out of the gallery; ``"Newton step"`` also moves the last layer away from what
    it learned of them. ``"gap"`` is the mean change of the gap of their queries.
    """
    encoder = supcon(*split.train)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = cc.Retriever(encoder, None, rate, None).fit(*split.train, held_out=split.held)._now

    def searched(x: Numbers) -> NDArray[np.float64]:
        return state.searched(embedded(state.posterior, x, "x"), None)[0].evidence

    def share(found: NDArray[np.float64]) -> float:
        return float((state.rule.present(found) <= state.rule.present_limit).mean())

    loss = cc.SupConLoss(0.1, pd_fix="full")
    la: Any = Laplace(encoder, "contrastive", "last_layer", backend_kwargs={"loss": loss})
    x, y = map(torch.from_numpy, split.train)
    la.fit([(x, y)])
    la.optimize_prior_precision()
    rows = []
    for part in np.array_split(np.random.default_rng(0).permutation(np.unique(split.train[1])), parts):
        gone, asked = np.isin(split.train[1], part), np.isin(split.held[1], part)
        moved = la.without([(x, y)], np.flatnonzero(gone).tolist(), newton_step=True)
        found = []
        for model in (la.model, moved.model):
            with torch.no_grad():
                points, queries = (
                    normalize(model(part)) for part in (x[~gone], torch.from_numpy(split.held[0][asked]))
                )
            columns = evidence(Embedded.alone(queries), points, y[~gone])[0]
            # What the posterior says of a query alone stays as it is.
            columns[:, _SEARCH:] = searched(split.held[0][asked])[:, _SEARCH:]
            found.append(columns)
        gap = (found[1] - found[0])[:, list(COLUMNS).index("gap")].mean()
        rows.append((*map(share, found), gap))
    taken, newton, gap = np.mean(rows, 0)
    shares = {"never seen": share(searched(split.unseen[0])), "known": share(searched(split.test[0]))}
    return {**shares, "taken out": float(taken), "Newton step": float(newton), "gap": float(gap)}


def newton_table(names: Sequence[str], choices: int, rate: float = 0.05) -> str:
    """Return means by set, and rank correlations of each number with the share of queries of unseen classes."""
    rows, shown = [], []
    for name in names:
        x, y = SETS[name].read()
        mine = [without_parts(split, rate) for split in splits(x, y, SETS[name].unseen, choices)]
        shown.append([name, *(f"{np.mean([row[key] for row in mine]):.3f}" for key in mine[0])])
        shown.append([f"{name}: correlation", *_correlations(mine)])
        rows += mine
    return table(["", *rows[0]], [*shown, ["all: correlation", *_correlations(rows)]])


def _correlations(rows: Sequence[dict[str, float]]) -> list[str]:
    true = [row["never seen"] for row in rows]
    return [f"{float(spearmanr(true, [row[key] for row in rows]).statistic):+.2f}" for key in rows[0]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.new_classes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--choices", type=int, default=10, help="random choices of classes (default: 10)")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--newton", action="store_true", help="judge what a Newton step says of classes taken out")
    chosen = parser.parse_args(arguments)
    if chosen.newton:
        print(newton_table(chosen.sets, chosen.choices))
        return
    for name in chosen.sets:
        kind = SETS[name]
        x, y = kind.read()
        for rate in (0.05, 0.1):
            rows = [shares(split, rate) for split in splits(x, y, kind.unseen, chosen.choices)]
            if rate == 0.05:
                print(f"\n{table(['', *rows[0]], [])}")
            means = {rule: np.mean([row[rule] for row in rows], 0) for rule in rows[0]}
            shown = (f"{new:.3f} ({known:.3f})" for new, known in means.values())
            print(f"| {name}, {len(np.unique(y)) - 3 * kind.unseen // 2}, {rate:g} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
