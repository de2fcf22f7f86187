"""``cc.Retriever`` on every encoder that has a feature file: is the match right, how much is answered, do rates hold?

``python -m benchmarks.transfer.answers FOLDER`` prints tables of benchmarks/results/answers.md. The gallery is
the training inputs, and the queries are the test inputs; where these are of classes that training has not seen, the
gallery is half of each of these classes. 500 queries are held out (half of them, where there are fewer than 1,000),
others judge. Whether more answers are wrong than asked is judged by 50 draws with replacement (``_above``).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import promises
from benchmarks.machine import table
from benchmarks.transfer.families import FAMILIES
from benchmarks.transfer.feature_file import FeatureFile, load_features
from benchmarks.transfer.fitted import DEFAULT, Fitted
from contrastive_curvature import RetrievalThreshold
from contrastive_curvature.errors import InputError
from contrastive_curvature.metrics import auroc as auroc_of
from contrastive_curvature.retriever.encoding import embedded
from contrastive_curvature.retriever.evidence import COLUMNS, Embedded, Searched, evidence
from contrastive_curvature.retriever.rule import Rates, certified

_HELD_OUT, _SPLITS, _DRAWS = 500, 20, 50
_CONFIDENCE, _MATCHES, _ALARMS = 0.9, 0.05, 0.02
_QUESTIONS = {"right": "right", "absent": "present", "unknown": "present"}
"""The questions, and the score of the retriever that answers each."""
_RISKS = ("half", "2 %", "5 %")
_BINS = 10

Numbers = NDArray[np.float64]


class Asked(NamedTuple):
    """Evidence of all queries of an encoder, of the same without their class, and of unknown inputs by kind."""

    queries: Searched
    absent: Searched
    unknown: dict[str, Searched]


class Encoded(NamedTuple):
    """What is searched, and what with: the gallery, queries of its classes, and unknown inputs by kind."""

    points: Embedded
    classes: torch.Tensor
    known: Embedded
    truth: torch.Tensor
    unknown: dict[str, Embedded]


def encoded(content: FeatureFile, unknown: dict[str, Any]) -> Encoded:
    """Fit the default posterior, and embed the gallery, its queries and features of unknown inputs."""
    tests, labels = content.test_features, content.test_labels
    if set(labels.tolist()) <= set(content.train_labels.tolist()):
        gallery, of = content.train_features, content.train_labels
        if content.calibration_features is not None and content.calibration_labels is not None:
            tests = np.concatenate([tests, content.calibration_features])
            labels = np.concatenate([labels, content.calibration_labels])
    else:
        order = np.random.default_rng(0).permutation(len(labels))
        order = order[labels[order].argsort(kind="stable")]
        gallery, of, tests, labels = tests[order[::2]], labels[order[::2]], tests[order[1::2]], labels[order[1::2]]
    la = Fitted(content).posterior(DEFAULT)
    points, known = (embedded(la, values, name, False) for values, name in ((gallery, "gallery"), (tests, "queries")))
    kinds = {kind: embedded(la, values, kind, False) for kind, values in unknown.items()}
    return Encoded(points, torch.from_numpy(of), known, torch.from_numpy(labels), kinds)


def asked(content: FeatureFile) -> Asked:
    """Search with the queries, with these without their class, and with the unknown inputs."""
    points, classes, known, truth, unknown = encoded(content, content.unknown)

    def searched(queries: Embedded, without: torch.Tensor | None = None) -> Searched:
        columns, match = evidence(queries, points.directions, classes, without)
        of = truth if queries is known else torch.full((len(match),), -1)
        right = (classes[match] == of) & (without is None)
        return Searched(columns, queries.novelty, right.numpy(), of.numpy())

    kinds = {kind: searched(queries) for kind, queries in unknown.items()}
    return Asked(searched(known), searched(known, truth), kinds)


def judged(every: Asked, splits: int = _SPLITS) -> dict[str, Any]:
    """Return means over splits: AUROC by question and score, what is answered by risk and score, and the rates."""
    n = len(every.queries.right)
    error = float(1 - every.queries.right.mean())
    risks = dict(zip(_RISKS, (error / 2, 0.02, 0.05), strict=True))
    rates = Rates(error / 2, _MATCHES, _ALARMS, _CONFIDENCE)
    rows: list[dict[str, Any]] = []
    for seed in range(splits):
        held, new = np.split(np.random.default_rng(seed).permutation(n), [min(_HELD_OUT, n // 2)])
        known, absent = every.queries[held], every.absent[held]
        queries, lacking = every.queries[new], every.absent[new]
        rule = certified(rates, known, absent)
        scores = {
            **{name: lambda x, k=k, sign=sign: -sign * x[:, k] for k, (name, sign) in enumerate(COLUMNS.items())},
            "right": rule.right,
            "present": rule.present,
        }
        auroc: dict[str, dict[Any, float]] = {question: {} for question in _QUESTIONS}
        for name, score in scores.items():
            right = score(queries.evidence[queries.right])
            auroc["right"][name] = _auroc(right, score(queries.evidence[~queries.right]))
            auroc["absent"][name] = _auroc(right, score(lacking.evidence))
            auroc["unknown"][name] = mean(_auroc(right, score(kind.evidence)) for kind in every.unknown.values())
        answered: dict[str, dict[str, float]] = {}
        for title, risk in risks.items():
            alone = certified(Rates(risk, None, None, _CONFIDENCE), known, absent)
            now = promises.answered(alone, queries)
            answered[title] = {"retriever": float(now.mean())}
            for k, (name, sign) in enumerate(COLUMNS.items()):
                try:
                    limit = RetrievalThreshold(risk, confidence_level=_CONFIDENCE)
                    limit.fit(-sign * known.evidence[:, k], known.right)
                    answered[title][name] = float(limit.accept(-sign * queries.evidence[:, k]).mean())
                except InputError:
                    answered[title][name] = 0.0
        decision = rule.decision(queries)
        now = decision == "answer"
        confidence = 1 / (1 + np.exp(rule.right(np.concatenate([queries.evidence, lacking.evidence]))))
        known_or_not = np.append(queries.right, np.zeros(len(lacking), bool))
        weight = np.repeat([1, 0.1], [len(queries.right), len(lacking)])
        of_unknown = [promises.answered(rule, kind).mean() for kind in every.unknown.values()]
        kept = {
            "answered": float(now.mean()),
            "wrong": float((~queries.right[now]).mean()) if now.any() else 0.0,
            "matches": float(promises.answered(rule, lacking).mean()),
            "alarms": float((decision == "unknown").mean()),
            "unknown": mean(map(float, of_unknown)),
        }
        shares = {f"answered {title}": shares for title, shares in answered.items()}
        rows.append({**auroc, **shares, "ece": {"": _ece(confidence, known_or_not, weight)}, "rates": kept})
    figures = {
        key: {str(name): float(np.nanmean([row[key][name] for row in rows])) for name in rows[0][key]}
        for key in rows[0]
    }
    figures["rates"]["above"] = mean(_above(every, rates, seed) for seed in range(_DRAWS))
    return {"error": error, "queries": n, **figures}


def _above(every: Asked, rates: Rates, seed: int) -> bool:
    """Return whether more answers are wrong than asked, with held-out queries drawn from all, and put back.

    The true rate is then that of all queries: those that judge add no chance of their own.
    """
    n = len(every.queries.right)
    held = np.random.default_rng(seed).integers(0, n, min(_HELD_OUT, n // 2))
    rule = certified(rates, every.queries[held], every.absent[held])
    now = rule.decision(every.queries) == "answer"
    return bool(now.any() and (~every.queries.right[now]).mean() > rates.wrong_answers)


def _auroc(low: Numbers, high: Numbers) -> float:
    if not len(low) or not len(high):
        return float("nan")
    return auroc_of(torch.from_numpy(low), torch.from_numpy(high))


def _ece(confidence: Numbers, right: NDArray[np.bool_], weight: Numbers) -> float:
    """Return the expected calibration error, of ten bins of equal width."""
    of = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    gaps = [abs((weight * (confidence - right))[of == k].sum()) for k in range(_BINS)]
    return float(sum(gaps) / weight.sum())


def tables(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield tables of means by family, in Markdown; more than .01 below the family's best single score is bold."""
    families = {title: [n for n in results if n.startswith(start)] for start, title in FAMILIES.items()}
    families = {title: names for title, names in families.items() if names}

    def averaged(names: Sequence[str], *path: str) -> float:
        values = [results[name] for name in names]
        for key in path:
            values = [value[key] for value in values]
        return mean(values)

    def compared(names: Sequence[str], question: str, ours: str) -> str:
        singles = {score: averaged(names, question, score) for score in COLUMNS}
        best = max(singles, key=lambda score: singles[score])
        text = f"{averaged(names, question, ours):.3f} / {singles[best]:.3f}"
        return (f"**{text}**" if averaged(names, question, ours) < singles[best] - 0.01 else text) + f" {best}"

    scores, answered, kept = [], [], []
    for title, names in families.items():
        error, by_cosine = averaged(names, "error"), [averaged(names, f"answered {risk}", "match") for risk in _RISKS]
        rates = {key: averaged(names, "rates", key) for key in results[names[0]]["rates"]}
        most = max(results[name]["rates"]["above"] for name in names)
        shown = [compared(names, question, score) for question, score in _QUESTIONS.items()]
        scores.append([title, len(names), f"{error:.3f}", *shown, f"{averaged(names, 'ece', ''):.3f}"])
        shown = [compared(names, f"answered {risk}", "retriever") for risk in _RISKS]
        answered.append([title, *shown, ", ".join(f"{share:.3f}" for share in by_cosine)])
        shown = [f"{rates[key]:.3f}" for key in ("matches", "alarms", "answered", "unknown")]
        kept.append([title, f"{error / 2:.3f}, {rates['wrong']:.3f}", f"{rates['above']:.2f}, {most:.2f}", *shown])
    yield table(["family", "encoders", "wrong", "right?", "class absent", "unknown kinds", "ECE"], scores)
    yield table(["family", *(f"at {risk}" for risk in _RISKS), "by the cosine alone"], answered)
    head = ["family", "wrong answers: asked, observed", "draws above: mean, most"]
    head += [f"class absent, answered ({_MATCHES:g} asked)", f"called unknown ({_ALARMS:g} asked)"]
    yield table([*head, "answered", "unknown kinds, answered"], kept)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer.answers", description=__doc__)
    parser.add_argument("folder", type=Path, help="of feature files, as runs/transfer; figures are kept beside them")
    folder = parser.parse_args(arguments).folder
    results = {}
    for path in sorted(folder.glob("*.npz")):
        kept = path.with_suffix(".answers.json")
        if not kept.is_file():
            kept.write_text(json.dumps(judged(asked(load_features(path)))))
            print(f"{path.stem}: judged", flush=True)
        results[path.stem] = json.loads(kept.read_text())
    print("\n\n".join(tables(results)))


if __name__ == "__main__":
    main()
