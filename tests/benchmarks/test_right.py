import numpy as np
import pytest
import torch
from scipy.special import softmax

from benchmarks import right
from benchmarks.transfer.feature_file import FeatureFile
from contrastive_curvature.retriever.evidence import Embedded


@pytest.mark.parametrize("without", [False, True])
def test_softmax_votes_are_logits_of_shares(without: bool) -> None:
    random = np.random.default_rng(0)
    points, queries = (Embedded.alone(torch.from_numpy(random.normal(size=(n, 4))).float()) for n in (60, 20))
    for part in (points, queries):
        part.directions.div_(part.directions.norm(dim=1, keepdim=True))
    classes, truth = torch.arange(60) % 3, torch.arange(20) % 3
    found = right.softmax_votes(queries, points, classes, truth if without else None)
    for row, query in enumerate(queries.directions.numpy()):
        there = np.flatnonzero((classes != truth[row]).numpy()) if without else np.arange(60)
        cosine, of = points.directions.numpy()[there] @ query, classes.numpy()[there]
        own, order = of == of[cosine.argmax()], np.argsort(-cosine)
        share = softmax(cosine / 0.1)[own].sum()
        assert found[row, 0] == pytest.approx(np.log(share / (1 - share)), abs=1e-3)
        near = np.union1d(order[:10], [order[~own[order]][0]])
        share = softmax(cosine[near] / 0.1)[own[near]].sum()
        assert found[row, 1] == pytest.approx(np.log(share / (1 - share)), abs=1e-3)


def encoder(seed: int) -> FeatureFile:
    """Features around four centres, of a class that is one of two of them, and noise as another kind."""
    random = np.random.default_rng(seed)
    labels = np.arange(240) % 4
    x = (2 * np.eye(6)[labels] + 0.7 * random.normal(size=(240, 6))).astype("float32")
    weight = random.normal(size=(3, 6)).astype("float32")
    noise = 3 * random.normal(size=(40, 6)).astype("float32")
    return FeatureFile(x[:120], labels[:120], x[120:], labels[120:], weight, np.zeros(3, "float32"), {"noise": noise})


def test_encoders_are_judged_in_small() -> None:
    results = {f"{name}-supcon": right.judged(encoder(seed), 2) for seed, name in enumerate(("digits", "names"))}
    strangers = {"digits-without-0": right.judged(encoder(0), 2, "noise")}
    assert strangers["digits-without-0"]["queries"] == 160
    assert strangers["digits-without-0"]["error"] > results["digits-supcon"]["error"]
    for result in results.values():
        six, alone = (result["variants"][name] for name in ("six", "gap alone"))
        assert 0.5 < np.mean(six["right"]) <= 1
        assert alone["weight of match"] == alone["weight of novelty"] == [0, 0]
        assert alone["weight of gap"] > [0, 0]
        assert set(result["unknown"]) == {"noise", right._MIXED}
    text = "\n".join([*right.tables(results), right.strangers_table(strangers)])
    assert "| digits (1) |" in text
    assert "nan" not in text.split("| classes that")[0]
