"""``cc.Retriever`` on every encoder that has a feature file: is the match right, how much is answered, do rates hold?

``python -m benchmarks.transfer.answers FOLDER`` prints the tables of benchmarks/results/answers.md. The gallery is
the training inputs, and the queries are the test inputs; where these are of classes that training has not seen, the
gallery is half of each of these classes. 500 queries are held out (half of them, where there are fewer than 1,000),
others judge.
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
from contrastive_curvature.retriever.evidence import COLUMNS, evidence
from contrastive_curvature.retriever.retriever import embedded
from contrastive_curvature.retriever.rule import Labelled, Rates, Regression, certified

_HELD_OUT, _SPLITS = 500, 20
_CONFIDENCE, _MATCHES, _ALARMS = 0.9, 0.05, 0.02
_WEIGHTS = (0.0, 0.03, 0.1, 0.3, 1.0)
_QUESTIONS = ("right", "absent", "unknown")
_BINS = 10

Numbers = NDArray[np.float64]


class Asked(NamedTuple):
    """Evidence of all queries of an encoder, of the same without their class, and of unknown inputs by kind."""

    queries: Labelled
    absent: Numbers
    unknown: dict[str, Numbers]


def asked(content: FeatureFile) -> Asked:
    """Fit the default posterior, and search."""
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
    points, queries = (embedded(la, values, name, False) for values, name in ((gallery, "gallery"), (tests, "queries")))
    classes, truth = torch.from_numpy(of), torch.from_numpy(labels)
    columns, match = evidence(queries, points.directions, classes)
    return Asked(
        Labelled(columns, (classes[match] == truth).numpy(), queries.novelty),
        evidence(queries, points.directions, classes, truth)[0],
        {
            kind: evidence(embedded(la, values, kind, False), points.directions, classes)[0]
            for kind, values in content.unknown.items()
        },
    )


def judged(every: Asked, splits: int = _SPLITS) -> dict[str, Any]:
    """Return means over splits: AUROC by question and score, what is answered by risk and score, and the rates."""
    n = len(every.queries.right)
    error = float(1 - every.queries.right.mean())
    risks = {"half": error / 2, "2 %": 0.02, "5 %": 0.05}
    rates = Rates(error / 2, _MATCHES, _ALARMS, _CONFIDENCE)
    rows: list[dict[str, Any]] = []
    for seed in range(splits):
        held, new = np.split(np.random.default_rng(seed).permutation(n), [min(_HELD_OUT, n // 2)])
        known, absent = promises.rows(every.queries, held), every.absent[held]
        queries, lacking = promises.rows(every.queries, new), every.absent[new]
        scores = {
            **{name: lambda x, k=k, sign=sign: -sign * x[:, k] for k, (name, sign) in enumerate(COLUMNS.items())},
            **{weight: Regression.fitted(known.evidence, known.right, absent, weight) for weight in _WEIGHTS},
        }
        auroc: dict[str, dict[Any, float]] = {question: {} for question in _QUESTIONS}
        for name, score in scores.items():
            right = score(queries.evidence[queries.right])
            auroc["right"][name] = _auroc(right, score(queries.evidence[~queries.right]))
            auroc["absent"][name] = _auroc(right, score(lacking))
            auroc["unknown"][name] = mean(_auroc(right, score(kind)) for kind in every.unknown.values())
        answered: dict[str, dict[str, float]] = {}
        for title, risk in risks.items():
            rule = certified(Rates(risk, None, None, _CONFIDENCE), known, absent)
            now = promises.answered(rule, queries.evidence, queries.novelty)
            answered[title] = {"retriever": float(now.mean())}
            for k, (name, sign) in enumerate(COLUMNS.items()):
                try:
                    limit = RetrievalThreshold(risk, confidence=_CONFIDENCE)
                    limit.fit(-sign * known.evidence[:, k], known.right)
                    answered[title][name] = float(limit.accept(-sign * queries.evidence[:, k]).mean())
                except InputError:
                    answered[title][name] = 0.0
        rule = certified(rates, known, absent)
        score = rule.regression(queries.evidence)
        decision = rule.decision(score, rule.p_value(queries.novelty))
        now = decision == "answer"
        confidence = 1 / (1 + np.exp(np.append(score, rule.regression(lacking))))
        rows.append(
            {
                **auroc,
                **{f"answered {title}": shares for title, shares in answered.items()},
                "ece": {
                    "": _ece(
                        confidence,
                        np.append(queries.right, np.zeros(len(lacking), bool)),
                        np.repeat([1, 0.1], [len(score), len(lacking)]),
                    )
                },
                "rates": {
                    "answered": float(now.mean()),
                    "wrong": float((~queries.right[now]).mean()) if now.any() else 0.0,
                    "above": bool(now.any() and (~queries.right[now]).mean() > rates.wrong_answers),
                    "matches": float(promises.answered(rule, lacking, queries.novelty).mean()),
                    "alarms": float((decision == "unknown").mean()),
                    "unknown": mean(
                        float(promises.answered(rule, kind, np.exp(kind[:, -1])).mean())
                        for kind in every.unknown.values()
                    ),
                },
            }
        )
    figures = {
        key: {str(name): float(np.nanmean([row[key][name] for row in rows])) for name in rows[0][key]}
        for key in rows[0]
    }
    return {"error": error, "queries": n, **figures}


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
    """Yield the tables, in Markdown; what is more than .01 below the best single score of its family is bold."""
    families = {title: [n for n in results if n.startswith(start)] for start, title in FAMILIES.items()}
    families = {title: names for title, names in families.items() if names}

    def best(names: Sequence[str], question: str) -> str:
        return max(COLUMNS, key=lambda score: mean(results[name][question][score] for name in names))

    def compared(name: str, question: str, score: str, ours: str = "0.1") -> str:
        mine, other = results[name][question][ours], results[name][question][score]
        text = f"{mine:.3f} / {other:.3f}"
        return f"**{text}**" if mine < other - 0.01 else text

    head = ["encoder", "wrong", "right? P(right) / best single", "class absent", "unknown kinds", "ECE"]
    rows = []
    for title, names in families.items():
        scores = {question: best(names, question) for question in _QUESTIONS}
        rows.append([f"*{title}*", "", *(f"*best: {score}*" for score in scores.values()), ""])
        for name in names:
            cells = [compared(name, question, score) for question, score in scores.items()]
            rows.append([name, f"{results[name]['error']:.3f}", *cells, f"{results[name]['ece']['']:.3f}"])
    yield table(head, rows)
    head = ["encoder", *(f"at {risk}: retriever / best single / match" for risk in ("half", "2 %", "5 %"))]
    rows = []
    for title, names in families.items():
        scores = {risk: best(names, f"answered {risk}") for risk in ("half", "2 %", "5 %")}
        rows.append([f"*{title}*", *(f"*best: {score}*" for score in scores.values())])
        for name in names:
            cells = [
                f"{compared(name, f'answered {risk}', score, 'retriever')} / "
                f"{results[name][f'answered {risk}']['match']:.3f}"
                for risk, score in scores.items()
            ]
            rows.append([name, *cells])
    yield table(head, rows)
    head = ["encoder", "wrong answers: asked, observed", "splits above", f"class absent, answered ({_MATCHES:g} asked)"]
    head += [f"called unknown ({_ALARMS:g} asked)", "answered", "unknown kinds, answered"]
    rows = []
    for name, found in results.items():
        rates = found["rates"]
        wrong, matches, alarms = (
            f"**{rates[key]:.3f}**" if rates[key] > limit else f"{rates[key]:.3f}"
            for key, limit in (("wrong", found["error"] / 2), ("matches", _MATCHES), ("alarms", _ALARMS))
        )
        above = f"**{rates['above']:.2f}**" if rates["above"] > 1 - _CONFIDENCE else f"{rates['above']:.2f}"
        cells = [f"{found['error'] / 2:.3f}, {wrong}", above, matches, alarms]
        rows.append([name, *cells, f"{rates['answered']:.3f}", f"{rates['unknown']:.3f}"])
    yield table(head, rows)

    def gain(names: Sequence[str], weight: float, question: str) -> float:
        score = best(names, question)
        return mean(results[name][question][str(weight)] - results[name][question][score] for name in names)

    head = ["family left out", "weight that the others choose", "right?", "class absent", "unknown kinds"]
    rows = []
    for title, names in families.items():
        others = [some for other, some in families.items() if other != title]
        if others:
            total = {w: sum(gain(some, w, q) for some in others for q in _QUESTIONS) for w in _WEIGHTS}
            weight = max(total, key=lambda w: total[w])
            gains = [gain(names, weight, question) for question in _QUESTIONS]
            rows.append([title, weight, *(f"**{g:+.3f}**" if g < -0.01 else f"{g:+.3f}" for g in gains)])
    yield table(head, rows)


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
