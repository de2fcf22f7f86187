"""``cc.Retriever`` as an object: inputs and labels of all kinds, a gallery that changes, files, refusals."""

import copy
import dataclasses
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pandas as pd
import pytest
import torch
from laplace import Laplace
from numpy.typing import NDArray
from tables import each, refused
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from contrastive_curvature.decisions.fitted import one_of_each, percent
from contrastive_curvature.retriever.answers import Answers
from contrastive_curvature.retriever.encoding import embedded

WIDTH, CLASSES = 6, 5
NAMES = np.array(["ant", "bee", "cat", "dog", "eel", "fox"])
ARRAYS = ("decision", "label", "neighbour", "confidence", "p_value")
RATES = {"wrong_answers": 0.2, "false_matches": 0.2, "false_alarms": 0.05}


class Points:
    """Clusters: ``x`` and class numbers ``y``."""

    def __init__(self, n: int, seed: int, classes: int = CLASSES) -> None:
        rng = np.random.default_rng(seed)
        self.y: NDArray[np.int64] = np.arange(n) % classes
        self.x = (3 * np.eye(6, WIDTH)[self.y] + rng.normal(size=(n, WIDTH))).astype(np.float32)
        self.names = NAMES[self.y]


TRAIN, HELD, TEST = Points(150, 1), Points(300, 2), Points(200, 3)
FITTED = {"held_out": (HELD.x, HELD.names), "gallery": (TRAIN.x, TRAIN.names)}


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 6)).eval()


@pytest.fixture(scope="module")
def la() -> Any:
    found = Laplace(encoder(), "contrastive")
    found.fit([(torch.from_numpy(TRAIN.x), torch.from_numpy(TRAIN.y))])
    found.optimize_prior_precision()
    return found


@pytest.fixture(scope="module")
def made() -> cc.Retriever:
    return new().fit(TRAIN.x, TRAIN.names, held_out=(HELD.x, HELD.names))


@pytest.fixture
def retriever(made: cc.Retriever) -> cc.Retriever:
    return copy.copy(made)


def new(model: Any = None, **rates: Any) -> cc.Retriever:
    return cc.Retriever(encoder() if model is None else model, **{**RATES, **rates})


def same(first: Answers, second: Answers) -> bool:
    return all(np.array_equal(getattr(first, name), getattr(second, name)) for name in ARRAYS)


def test_answers_say_what_the_search_says(retriever: cc.Retriever) -> None:
    answers = retriever(TEST.x)
    found = retriever.la.predict(TEST.x)
    stored = retriever.la.predict(TRAIN.x).mu
    cosine = found.mu @ stored.T
    np.testing.assert_array_equal(answers.neighbour, cosine.argmax(1).numpy())
    np.testing.assert_array_equal(answers.label, TRAIN.names[answers.neighbour])
    held = retriever.la.predict(HELD.x).novelty.numpy()
    wanted = (1 + (held[None] >= found.novelty.numpy()[:, None] * (1 - 1e-5)).sum(1)) / 301
    np.testing.assert_allclose(answers.p_value, wanted)
    np.testing.assert_array_equal(answers.decision == "unknown", answers.p_value <= 0.05)
    # Unsure for either reason.
    rule, seen = retriever._now.rule, retriever._now.searched(embedded(retriever.la, TEST.x, "queries"), None)[0]
    columns = seen.evidence
    np.testing.assert_allclose(answers.confidence, 1 / (1 + np.exp(rule.right(columns))))
    refused = np.stack([rule.right(columns) > rule.limit, rule.present(columns) > rule.present_limit])
    np.testing.assert_array_equal(answers.decision == "answer", ~refused.any(0) & (answers.decision != "unknown"))
    assert refused.any(1).all()
    table = answers.to_pandas()
    assert tuple(table.columns) == ARRAYS
    assert len(table) == len(answers) == 200
    text = (
        f"answers {100 * retriever.answered:.3g} % of queries; at most 20 % of the answers are wrong (90 % confidence, "
        "from 300 held-out queries); at most 20 % of such queries are answered where the gallery lacks their class, "
        "on average; these are 5 classes taken out of the gallery: if the encoder was trained on them, more queries "
        "are answered of classes that nobody knows (nearly as few from about 60 classes on); at most 5 % of them are "
        "called unknown, on average; kept back: 26.7 % by false_matches, 12.3 % by wrong_answers, 4.67 % by "
        "false_alarms"
    )
    assert repr(retriever) == text
    assert retriever.answered > 0.2


def test_evaluation_counts_what_the_answers_do(retriever: cc.Retriever) -> None:
    strange = 5 * np.random.default_rng(0).normal(size=TEST.x.shape).astype(np.float32)
    answers, report = retriever(TEST.x), retriever.evaluate((TEST.x, TEST.names), unknown=strange)
    done, wrong = answers.decision == "answer", answers.label != TEST.names
    assert report["answered"].observed == done.mean()
    assert report["wrong_answers"].observed == (wrong & done).sum() / done.sum()
    assert report["wrong_answers"].queries == done.sum()
    assert report["false_alarms"].observed == (answers.decision == "unknown").mean()
    assert [report[name].asked for name in ("wrong_answers", "false_matches", "false_alarms")] == [0.2, 0.2, 0.05]
    assert report["unknown_found"].observed == (retriever(strange).decision == "unknown").mean() > 0.1
    without = []
    for name in NAMES[:CLASSES]:
        small = copy.copy(retriever)
        rule = small._now.rule
        small.remove(np.flatnonzero(TRAIN.names == name))
        small._state = dataclasses.replace(small._now, rule=rule)
        without += (small(TEST.x[TEST.names == name]).decision == "answer").tolist()
    assert report["false_matches"].observed == np.mean(without)
    low, high = report["false_matches"].low, report["false_matches"].high
    assert low < report["false_matches"].observed < high


@each(
    "train, held, test",
    [
        (
            (torch.from_numpy(TRAIN.x), torch.from_numpy(TRAIN.y)),
            (torch.from_numpy(HELD.x), HELD.y.tolist()),
            torch.from_numpy(TEST.x),
        ),
        (
            (DataLoader(TensorDataset(torch.from_numpy(TRAIN.x), torch.from_numpy(TRAIN.y)), batch_size=64), None),
            DataLoader(TensorDataset(torch.from_numpy(HELD.x), torch.from_numpy(HELD.y)), batch_size=64, shuffle=True),
            DataLoader(TensorDataset(torch.from_numpy(TEST.x), torch.from_numpy(TEST.y)), batch_size=64),
        ),
        ((TRAIN.x, TRAIN.names), [(torch.from_numpy(HELD.x), HELD.names)], [torch.from_numpy(TEST.x)]),
        ((TRAIN.x, [("kind", int(k)) for k in TRAIN.y]), (HELD.x, [("kind", int(k)) for k in HELD.y]), TEST.x),
    ],
)
def test_inputs_and_labels_of_all_kinds_give_the_same_answers(train: Any, held: Any, test: Any) -> None:
    wanted = new().fit(TRAIN.x, TRAIN.y, held_out=(HELD.x, HELD.y))(TEST.x)
    found = new().fit(*train, held_out=held)(test)
    np.testing.assert_array_equal(found.neighbour, wanted.neighbour)
    np.testing.assert_allclose(found.p_value, wanted.p_value, atol=0.02)  # a shuffled loader adds in another order
    given = train[1][found.neighbour[0]] if isinstance(train[1], list) else TRAIN.names[found.neighbour[0]]
    assert found.label[0] in (given, TRAIN.y[found.neighbour[0]])


class Words(nn.Module):
    """Texts of six characters, by the codes of these."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))

    def tokenize(self, texts: list[str]) -> dict[str, Tensor]:
        return {"codes": torch.tensor([[(ord(c) - 109) / 8 for c in text] for text in texts])}

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.net(x["codes"])


def test_texts() -> None:
    rng = np.random.default_rng(0)

    def texts(n: int) -> tuple[list[str], list[str]]:
        labels = ["early" if k % 2 else "late" for k in range(n)]
        return [
            "".join(chr(rng.integers(97, 105) + 16 * (name == "late")) for _ in range(6)) for name in labels
        ], labels

    retriever = cc.Retriever(Words(), 0.1, None, 0.05).fit(*texts(60), held_out=texts(100))
    answers = retriever(["abcdef", "tuvwxy"])
    assert answers.label.tolist() == ["early", "late"]
    assert retriever.answered > 0.9
    assert retriever.evaluate([texts(10)])["wrong_answers"].observed == 0
    head = cc.Retriever(Words(), 0.3, None, None, head=True).fit([texts(60)], held_out=texts(20))
    assert head(["abcdef", "tuvwxy"]).label.tolist() == ["early", "late"]


@each("head", [False, True])
def test_the_encoder_runs_once_over_each_input_and_texts_are_sorted_by_length(head: bool) -> None:
    batches: list[list[str]] = []

    class Lengths(nn.Module):
        """A text by the share and number of its letters a."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 4))

        def tokenize(self, texts: list[str]) -> dict[str, Tensor]:
            batches.append(texts)
            return {"counts": torch.tensor([[text.count("a") / len(text), len(text) / 500] for text in texts])}

        def forward(self, x: dict[str, Tensor]) -> Tensor:
            return self.net(x["counts"])

    texts = ["".join(row) for n in range(1, 301) for row in (["a"] * n, ["b"] * n)]
    labels = [text[0] for text in texts]
    order = np.random.default_rng(0).permutation(len(texts))
    train, held = (([texts[k] for k in rows], [labels[k] for k in rows]) for rows in (order[:300], order[300:]))
    retriever = cc.Retriever(Lengths(), 0.3, None, None, head=head).fit(*train, held_out=held)
    assert [len(batch) for batch in batches] == [256, 44, 256, 44]
    assert [len(text) for batch in batches[:2] for text in batch] == sorted(map(len, train[0]))
    assert retriever(texts).label.tolist() == labels


def test_a_gallery_that_grew_is_as_one_that_was_given_and_one_that_shrank_as_before(la: Any) -> None:
    first, rest = slice(0, 100), slice(100, None)
    whole = new(la).fit(**FITTED)
    grown = new(la).fit(held_out=FITTED["held_out"], gallery=(TRAIN.x[first], TRAIN.names[first]))
    before, limit = grown(TEST.x), grown._now.rule.limit
    identifiers = grown.add(TRAIN.x[rest], TRAIN.names[rest])
    assert identifiers.tolist() == list(range(100, 150))
    assert grown._now.rule.limit == whole._now.rule.limit != limit
    assert same(grown(TEST.x), whole(TEST.x))
    assert same(grown.remove(identifiers)(TEST.x), before)
    assert grown.add(TRAIN.x[:1], ["ant"]).tolist() == [150]


def test_added_classes_are_said_to_be_uncovered_until_queries_of_them_are_learned(retriever: cc.Retriever) -> None:
    more = Points(120, 4, classes=6)
    new_ones = more.names == "fox"
    with pytest.warns(UserWarning, match=r"add: no rate covers .* 'fox' \(1 classes, 11.8 % of the gallery\)"):
        retriever.add(more.x[new_ones], more.names[new_ones])
    assert retriever.uncovered == ["fox"]
    assert "no rate covers queries of the classes 'fox'" in repr(retriever)
    retriever.learn(more.x, more.names, asked="random")
    assert retriever.uncovered == []
    assert "no rate covers" not in repr(retriever)
    assert "from 420 held-out queries" in repr(retriever)


def test_what_is_learned_at_random_is_held_out_and_what_is_learned_of_answers_only_lowers(la: Any) -> None:
    whole = new(la, false_matches=None).fit(**FITTED)
    part = new(la, false_matches=None).fit(held_out=(HELD.x[:200], HELD.names[:200]), gallery=FITTED["gallery"])
    assert same(part.learn(HELD.x[200:], HELD.names[200:], asked="random")(TEST.x), whole(TEST.x))
    limits = [whole._now.rule.limit]
    for seed in range(5, 8):
        fed = Points(200, seed)
        whole.learn(fed.x, fed.names, asked="answered")
        limits.append(whole._now.rule.limit)
    assert (np.diff(limits) <= 0).all()
    assert "from 300 held-out queries and" in repr(whole)
    done = whole(TEST.x).decision == "answer"
    whole.learn(TEST.x[~done], TEST.names[~done], asked="answered")
    assert whole._now.rule.limit == limits[-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole.learn(TEST.x[done], np.full(done.sum(), "wrong"), asked="answered")
    assert whole._now.rule.limit < limits[-1]


@each(
    "rates, held, message",
    [
        ({"false_matches": 0.001}, 300, ("false_matches", "at least 999 held-out queries", "there are 300")),
        (
            {"wrong_answers": 0.01, "false_matches": None},
            300,
            ("wrong_answers", "of 300 held-out queries, ", " are wrong. It takes about "),
        ),
        ({"wrong_answers": 1e-5, "false_matches": None}, 300, ("wrong_answers", "it takes 230,258 of them")),
        ({"false_alarms": 0.01}, 50, ("false_alarms", "no query is unknown", "at least 99")),
    ],
)
def test_where_no_limit_keeps_a_rate_nothing_is_answered_and_the_reason_is_said(rates, held, message, la) -> None:
    # One in ten has a wrong label: no score can tell.
    names = np.where(np.arange(300) % 10 == 0, "fox", HELD.names)[:held]
    gallery = TRAIN.x, TRAIN.names
    with pytest.warns(UserWarning, match=message[0]):
        retriever = new(la, **rates).fit(held_out=(HELD.x[:held], names), gallery=gallery)
    assert all(part in repr(retriever) for part in message), repr(retriever)
    assert set(retriever.reasons) == {message[0]}
    if message[0] == "false_alarms":
        assert set(retriever(TEST.x).decision) <= {"answer", "unsure"}
    else:
        assert retriever.answered == 0
        assert set(retriever(TEST.x).decision) <= {"unsure", "unknown"}


@each("count", [6, 20])
def test_a_warning_of_too_few_held_out_queries_says_how_many_it_takes(count: int) -> None:
    retriever = cc.Retriever(None, wrong_answers=0.01, false_matches=None, false_alarms=None)
    far = 3 * np.eye(6, WIDTH)[np.arange(count) % CLASSES] + 0.01 * np.random.default_rng(0).normal(size=(count, WIDTH))
    with pytest.warns(UserWarning, match=r"nothing is answered: .* takes (about )?[2-9]\d\d "):
        retriever.fit(gallery=FITTED["gallery"], held_out=(far[:3], NAMES[:3]))
    with pytest.warns(UserWarning, match=r"nothing is answered: .* takes (about )?[2-9]\d\d "):
        retriever.fit(gallery=FITTED["gallery"], held_out=(far, NAMES[np.arange(count) % CLASSES]))


def test_at_the_edge_of_what_is_feasible_the_print_says_so(retriever: cc.Retriever) -> None:
    words = "hardly enough: most fits of so few answer nothing"
    assert words not in repr(retriever)
    # At 20 % and 90 %, two wrong of 18 are too many, and one is not.
    assert retriever.rates.threshold().first(300) == 18
    few = dataclasses.replace(retriever._now.rule, answered=20 / 300)
    retriever._state = dataclasses.replace(retriever._now, rule=few)
    assert words in repr(retriever)


def test_repeated_held_out_queries_count_once() -> None:
    wanted = cc.Retriever(None, **RATES).fit(**FITTED)
    rows = np.append(np.arange(300), np.random.default_rng(0).integers(0, 300, 700))
    retriever = cc.Retriever(None, **RATES)
    with pytest.warns(UserWarning, match="held_out: 700 of 1,000 held-out queries are repetitions of others"):
        retriever.fit(gallery=FITTED["gallery"], held_out=(HELD.x[rows], HELD.names[rows]))
    assert repr(retriever) == repr(wanted)
    assert same(retriever(TEST.x), wanted(TEST.x))
    with pytest.warns(UserWarning, match="queries: 50 of 350 held-out queries are repetitions"):
        retriever.learn(HELD.x[:50], HELD.names[:50], asked="random")
    assert same(retriever(TEST.x), wanted(TEST.x))


def test_one_held_out_query_of_each_group_counts() -> None:
    # Three pictures of each of a hundred persons.
    person = np.arange(300) % 100
    retriever = cc.Retriever(None, **RATES).fit(**FITTED, groups=[f"person {k}" for k in person])
    assert "from 100 held-out queries" in repr(retriever)
    kept = one_of_each(person.tolist())
    wanted = cc.Retriever(None, **RATES).fit(gallery=FITTED["gallery"], held_out=(HELD.x[kept], HELD.names[kept]))
    assert same(retriever(TEST.x), wanted(TEST.x))
    assert sorted(person[kept]) == list(range(100))
    assert len(set(kept // 100)) == 3
    refused(lambda: cc.Retriever(None).fit(**FITTED, groups=person[1:]), "groups", "300", "299")


def test_a_rate_of_none_limits_nothing_and_is_not_stated(la: Any) -> None:
    retriever = new(la, wrong_answers=None, false_matches=None, false_alarms=None)
    retriever.fit(held_out=(HELD.x[:2], HELD.names[:2]), gallery=(TRAIN.x, TRAIN.names))
    assert set(retriever(TEST.x).decision) == {"answer"}
    assert repr(retriever).startswith("answers 100 % of queries (from 2 held-out queries); no rate covers")


@each("rate", ["wrong_answers", "false_matches", "false_alarms"])
def test_a_rate_alone_keeps_back_all_that_is_not_answered(la: Any, rate: str) -> None:
    asked = {**dict.fromkeys(["wrong_answers", "false_matches", "false_alarms"]), rate: 0.1}
    retriever = new(la, **asked).fit(**FITTED)
    back = retriever._now.rule.kept_back
    assert back == {**dict.fromkeys(asked, 0), rate: pytest.approx(1 - retriever.answered)}
    assert f"kept back: {percent(back[rate])} by {rate}" in repr(retriever)


@pytest.fixture
def folder(retriever: cc.Retriever, tmp_path: Path) -> Path:
    retriever.learn(TEST.x[:50], TEST.names[:50], asked="answered")
    retriever.remove(retriever.add(TEST.x[:2], TEST.names[:2])[1:])
    return retriever.save(tmp_path / "saved")


def test_a_loaded_retriever_gives_the_same_answers_and_goes_on_alike(retriever: cc.Retriever, folder: Path) -> None:
    loaded = cc.Retriever.load(folder, encoder())
    assert same(loaded(TEST.x), retriever(TEST.x))
    assert repr(loaded) == repr(retriever)
    for each_of in (loaded, retriever):
        each_of.remove([0, 7, 150])
        assert each_of.add(TEST.x[:1], TEST.names[:1]).tolist() == [152]
        each_of.learn(TEST.x[:100], TEST.names[:100], asked="random")
    assert same(loaded(TEST.x), retriever(TEST.x))
    assert [path.name for path in folder.iterdir()] == ["retriever.safetensors"]
    loaded.save(folder, overwrite=True)
    assert repr(cc.Retriever.load(folder, encoder())) == repr(loaded)


def test_files_of_another_retriever_or_encoder_are_refused(made: cc.Retriever, folder: Path, tmp_path: Path) -> None:
    other = encoder()
    next(other.parameters()).data += 1
    refused(lambda: cc.Retriever.load(folder, other), "encoder")
    refused(lambda: made.save(folder), "new or an empty folder", "overwrite=True")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letters.txt").write_text("")
    refused(lambda: made.save(tmp_path / "full", overwrite=True), "Name another folder")
    path = folder / "retriever.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused(lambda: cc.Retriever.load(folder, encoder()), "damaged")
    path.write_bytes(content)
    refused(lambda: cc.Retriever.load(tmp_path, encoder()), "no such file")


def test_labels_of_several_kinds_are_saved_as_they_are(la: Any, tmp_path: Path) -> None:
    labels = [("ant", 1, 2.5, False, "1")[k] for k in HELD.y]
    retriever = new(la).fit(held_out=(HELD.x, labels), gallery=(HELD.x[:50] + 0.1, labels[:50]))
    found = cc.Retriever.load(retriever.save(tmp_path / "saved"), encoder())(TEST.x).label
    assert [(label, type(label)) for label in found] == [(label, type(label)) for label in retriever(TEST.x).label]
    assert {type(label) for label in found} == {str, int, float, bool}
    pairs = [(1, int(k)) for k in HELD.y]
    retriever = new(la).fit(held_out=(HELD.x, pairs), gallery=(HELD.x[:9] + 0.1, pairs[:9]))
    refused(lambda: retriever.save(tmp_path / "other"), "labels: a tuple", kind=cc.UnsupportedError)


def test_a_posterior_without_training_inputs_has_to_be_calibrated(la: Any) -> None:
    bare = Laplace(encoder(), "contrastive")
    bare.load_state_dict(la.state_dict())
    bare.posterior = dataclasses.replace(bare.posterior, calibration=None)
    refused(lambda: new(bare).fit(**FITTED), "la.calibrate(loader)", kind=cc.NotFittedError)
    bare.calibrate([torch.from_numpy(TEST.x)])
    assert new(bare).fit(**FITTED).answered > 0


def test_inputs_of_the_calibration_may_be_held_out_too_where_training_inputs_measure_novelty() -> None:
    la = Laplace(encoder(), "contrastive")
    la.fit([(torch.from_numpy(TRAIN.x), torch.from_numpy(TRAIN.y))])
    la.optimize_prior_precision()
    answers = []
    for known in (HELD.x, Points(300, 9).x):
        la.calibrate([torch.from_numpy(known)])
        answers.append(new(la).fit(**FITTED)(TEST.x))
    assert same(*answers)


def test_held_out_queries_of_the_training_are_noticed() -> None:
    with (
        pytest.warns(UserWarning, match=r"held_out: 100 % of the queries are in the gallery\. No rate holds"),
        pytest.warns(cc.OptimisticPValueWarning, match="among those that the posterior was fitted"),
    ):
        new().fit(TRAIN.x, TRAIN.y, held_out=(TRAIN.x, TRAIN.y))


FIT = {"x": TRAIN.x, "y": TRAIN.y, "held_out": (HELD.x, HELD.y)}


@each(
    "call, kind, words",
    [
        (lambda _: cc.Retriever("model"), cc.InputTypeError, ("encoder", "torch.nn.Module", "a str")),
        (lambda _: cc.Retriever(new().fit(**FIT).la, head=True), cc.InputError, ("head", "Pass the encoder")),
        (
            lambda _: cc.Retriever(None).fit(**{**FIT, "held_out": (HELD.x * np.nan, HELD.y)}),
            cc.InputError,
            ("held_out",),
        ),
        (lambda _: cc.Retriever(encoder(), wrong_answers=2), cc.InputError, ("wrong_answers", "(0, 1)", "2")),
        (lambda _: cc.Retriever(encoder(), false_matches=0), cc.InputError, ("false_matches", "(0, 1)")),
        (lambda _: cc.Retriever(encoder(), false_alarms="1 %"), cc.InputTypeError, ("false_alarms", "1 %")),
        (lambda _: cc.Retriever(encoder(), confidence_level=1), cc.InputError, ("confidence_level", "(0, 1)")),
        (lambda _: cc.Retriever(encoder(), confidence=0.9), TypeError, ("confidence",)),
        (lambda _: new()(TEST.x), cc.NotFittedError, ("Retriever: expected a fit", "fit(...)")),
        (lambda _: new().answered, cc.NotFittedError, ("Retriever: expected a fit", "fit(...)")),
        (lambda _: new().save("here"), cc.NotFittedError, ("Retriever: expected a fit", "fit(...)")),
        (lambda _: new().fit(**{**FIT, "y": TRAIN.y[1:]}), cc.InputError, ("x: labels", "150", "149")),
        (lambda _: new().fit(**{**FIT, "y": None}), cc.InputTypeError, ("x: labels", "NoneType")),
        (lambda _: new().fit(**{**FIT, "y": "ant"}), cc.InputTypeError, ("x: labels", "a str")),
        (lambda _: new().fit(**{**FIT, "x": "texts"}), cc.InputError, ("x",)),
        (lambda _: new().fit(**{**FIT, "held_out": HELD.x}), cc.InputTypeError, ("held_out", "(inputs, labels)")),
        (lambda _: new().fit(**{**FIT, "held_out": (HELD.x, HELD.y + np.nan)}), cc.InputError, ("held_out", "got nan")),
        (lambda _: new().fit(**{**FIT, "held_out": (HELD.x, HELD.x)}), cc.InputError, ("held_out", "shape (N,)")),
        (lambda _: new().fit(**{**FIT, "gallery": 3}), cc.InputTypeError, ("gallery", "int")),
        (lambda r: r([HELD.x[0], HELD.x[0, 1:]]), cc.InputError, ("queries", "all of one length")),
        (lambda r: r(TEST.x[:0]), cc.InputError, ("queries", "at least one")),
        (lambda r: r(TEST.x[:, 1:]), cc.InputError, ("queries: batch 0",)),
        (lambda r: r.add(TEST.x, TEST.y[:3]), cc.InputError, ("items: labels", "200", "3")),
        (lambda r: r.add([(torch.from_numpy(TEST.x), TEST.y)], TEST.y), cc.InputError, ("items", "beside a loader")),
        (lambda r: r.remove([3, 400]), cc.InputError, ("identifiers", "[400]")),
        (lambda r: r.remove(np.arange(150) == 3), cc.InputTypeError, ("identifiers", "whole numbers", "bool", "mask")),
        (lambda r: r.remove(["3"]), cc.InputTypeError, ("identifiers", "whole numbers", "<U1")),
        (lambda r: r.remove([3.0]), cc.InputTypeError, ("identifiers", "whole numbers", "float64")),
        (lambda r: r.remove(range(150)), cc.InputError, ("identifiers", "all")),
        (lambda r: r.learn(TEST.x, TEST.names, asked="some"), cc.InputError, ("asked", "'random'", "'answered'")),
        (lambda r: r.evaluate([torch.from_numpy(TEST.x)]), cc.InputTypeError, ("test", "(inputs, labels)")),
    ],
)
def test_refusals_name_the_argument(call: Any, kind: type[Exception], words: tuple[str, ...], made: Any) -> None:
    with pytest.raises(kind) as raised:
        call(made)
    assert all(word in str(raised.value) for word in words), str(raised.value)


@each("missing", [None, np.nan, pd.NA, pd.NaT, np.datetime64("NaT"), np.ma.masked, torch.tensor(torch.nan)])
def test_a_label_that_is_missing_is_refused_by_its_position(missing: Any) -> None:
    labels = [*HELD.names[:7], missing, *HELD.names[8:]]
    retriever = cc.Retriever(None, **RATES)
    words = "held_out: labels", "at position 7", "Leave out inputs without a label"
    x = torch.from_numpy(HELD.x)
    for held_out in ((HELD.x, labels), [(x[:5], labels[:5]), (x[5:], labels[5:])]):
        refused(lambda held_out=held_out: retriever.fit(**{**FITTED, "held_out": held_out}), *words)


@each(
    "read",
    [
        lambda x: x.tolist(),
        list,
        lambda x: list(torch.from_numpy(x)),
        pd.DataFrame,
        lambda x: pd.Series(list(x)),
        lambda x: pd.Series(list(x)).to_numpy(),
        lambda x: x[:, ::-1].copy()[:, ::-1],
        lambda x: x[::-1].copy()[::-1],
        np.asfortranarray,
        lambda x: x.astype(">f4"),
        lambda x: x.astype(">f8"),
        lambda x: x.astype(np.longdouble),
        lambda x: x.astype(ml_dtypes.bfloat16),
        lambda x: x.astype(np.float16),
        lambda x: x.astype(">i2"),
        torch.from_numpy,
    ],
)
def test_all_doors_take_inputs_of_all_kinds(read: Any, retriever: cc.Retriever) -> None:
    flat = cc.Retriever(None, **RATES).fit(held_out=FITTED["held_out"], gallery=(read(TRAIN.x), TRAIN.names))
    given = read(TEST.x[:60])
    numbers = (
        given
        if isinstance(given, Tensor)
        else torch.tensor(
            np.array(
                [list(map(float, row)) for row in (given.to_numpy() if hasattr(given, "to_numpy") else given)],
                dtype=np.float32,
            )
        )
    )
    np.testing.assert_array_equal(flat(given).label, flat(numbers).label)
    if str(getattr(given, "dtype", "")) != ">i2":  # integers stay, for encoders of tokens
        wanted = retriever.la(numbers).mu
        torch.testing.assert_close(retriever.la(given).mu, wanted)
        torch.testing.assert_close(retriever.la(given, on_invalid="nan").mu, wanted)
        torch.testing.assert_close(retriever.la.predict(given).mu, wanted)
        assert same(retriever(given), retriever(numbers))


@each(
    "wrong, words",
    [
        (HELD.x.astype(float) * 1e39, "within the range of torch.float32"),
        (torch.from_numpy(HELD.x).double() * 1e39, "infinity"),
        (torch.from_numpy(HELD.x).double() * 1e-60, "zeros"),
        (HELD.x.astype(complex), "real numbers"),
        (torch.from_numpy(HELD.x) + 0j, "real numbers"),
        (np.ma.MaskedArray(HELD.x, HELD.x > 1), "without a mask"),
        (HELD.x.astype(str), "real numbers"),
    ],
)
def test_values_that_a_cast_would_lose_are_refused(wrong: Any, words: str) -> None:
    retriever = cc.Retriever(None, **RATES).fit(**FITTED)
    refused(lambda: retriever(wrong), "queries", words)
    refused(lambda: retriever.fit(**{**FITTED, "held_out": (wrong, HELD.names)}), "held_out", words)


def test_embeddings_as_they_are(tmp_path: Path) -> None:
    retriever = cc.Retriever(None, **RATES).fit(**FITTED)
    answers = retriever(TEST.x)
    unit = [torch.nn.functional.normalize(torch.from_numpy(points.x), dim=1) for points in (TEST, TRAIN, HELD)]
    cosine, held = unit[0] @ unit[1].T, (unit[2] @ unit[1].T).topk(10).values.mean(1)
    np.testing.assert_array_equal(answers.neighbour, cosine.argmax(1))
    # Unknown is what is far from its ten nearest.
    far = (held[None] <= cosine.topk(10).values.mean(1)[:, None]).sum(1)
    np.testing.assert_allclose(answers.p_value, (1 + far) / 301, atol=0.004)
    assert retriever.la is None
    assert retriever.answered > 0.2
    assert (retriever._now.rule.right.weights[4:6] == 0).all()
    loaders = {name: [(torch.from_numpy(x), labels)] for name, (x, labels) in FITTED.items()}
    assert same(cc.Retriever(None, **RATES).fit(**loaders)([torch.from_numpy(TEST.x)]), answers)
    loaded = cc.Retriever.load(retriever.save(tmp_path / "saved"), None)
    loaded.save(tmp_path / "saved", overwrite=True)
    for changed in (loaded, retriever):
        changed.remove([0, 7])
        changed.learn(TEST.x[:100], TEST.names[:100], asked="answered")
    assert same(loaded(TEST.x), retriever(TEST.x))
    assert repr(loaded) == repr(retriever)
    refused(lambda: cc.Retriever.load(tmp_path / "saved", encoder()), "encoder: expected None")


@each("model", [None, encoder()])
def test_a_head_is_trained_saved_and_the_same_again(model: nn.Module | None, tmp_path: Path) -> None:
    # A large number that says nothing of the class, which a head learns to ignore.
    scale = np.float32([1, 1, 1, 1, 1, 8])
    x, held, asked = (points.x * scale for points in (TRAIN, HELD, TEST))

    def fitted(head: bool = True) -> cc.Retriever:
        return cc.Retriever(model, **RATES, head=head).fit(x, TRAIN.names, held_out=(held, HELD.names))

    folder = tmp_path / type(model).__name__
    before = None if model is None else copy.deepcopy(model.state_dict())
    retriever = fitted()
    torch.manual_seed(7)
    assert same(fitted()(asked), retriever(asked))
    assert before is None or all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    raw = fitted(head=False)
    right = [(found(asked).label == TEST.names).mean() for found in (raw, retriever)]
    assert right[1] > right[0] - 0.03
    assert retriever.la.predict(asked[:2]).mu.shape == (2, 64)
    assert retriever._now.held.uncertainty.std() > 0
    loaded = cc.Retriever.load(retriever.save(folder), model)
    assert same(loaded(asked), retriever(asked))
    loaded.save(folder, overwrite=True)
    assert same(cc.Retriever.load(folder, model)(asked), retriever(asked))


class Exact:
    """An index of unit vectors under numbers."""

    def __init__(self, vectors: Tensor) -> None:
        self.vectors, self.ids, self.asked = vectors, torch.arange(len(vectors)), 0

    def search(self, vectors: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self.asked += 1
        top = (vectors @ self.vectors.T).topk(k)
        return 1 - top.values, self.ids[top.indices]


def test_an_exact_index_gives_the_answers_of_the_search_of_all() -> None:
    wanted = cc.Retriever(None, **RATES).fit(**FITTED)
    index = Exact(torch.nn.functional.normalize(torch.from_numpy(TRAIN.x), dim=1))
    found = cc.Retriever(None, **RATES, index=index).fit(**FITTED)
    # What the gallery has no longer counts no more.
    for gone in (range(0), range(0, 100, 2)):
        answers, others = found.remove(gone)(TEST.x), wanted.remove(gone)(TEST.x)
        np.testing.assert_array_equal(answers.neighbour, others.neighbour)
        np.testing.assert_array_equal(answers.decision, others.decision)
        np.testing.assert_allclose(answers.confidence, others.confidence, rtol=1e-4)
    assert index.asked > 4


def test_labels_of_other_names_are_noticed() -> None:
    retriever = cc.Retriever(None, **RATES)
    with pytest.warns(UserWarning, match="No match has the label of its query: does the gallery"):
        retriever.fit(TRAIN.x, TRAIN.names, held_out=(HELD.x, np.full(300, 3)))


@pytest.mark.parametrize("as_loader", [False, True])
def test_because_names_the_items_without_which_the_margin_weakens_most(as_loader: bool) -> None:
    x, y = torch.from_numpy(TRAIN.x), torch.from_numpy(TRAIN.y)
    # It shuffles: identifiers are positions in its data set.
    train: Any = (DataLoader(TensorDataset(x, y), 40, shuffle=True),) if as_loader else (TRAIN.x, TRAIN.names)
    retriever = new().fit(*train, held_out=(HELD.x, HELD.y if as_loader else HELD.names))
    asked = torch.from_numpy(TEST.x[:70])
    identifiers, changes = retriever.because(asked, *train, k=4)
    answered = TRAIN.y[retriever(asked).neighbour]
    expected = cc.influence(retriever.la, [(x, y)], [(asked, torch.from_numpy(answered))]).double()
    values, rows = expected.topk(4, largest=False)
    np.testing.assert_allclose(changes, values.numpy(), rtol=1e-3, atol=1e-7)
    assert (identifiers == rows.numpy()).mean() > 0.95


def test_because_refuses_what_it_cannot_explain(retriever: cc.Retriever) -> None:
    flat = cc.Retriever(None, **RATES).fit(**FITTED)
    words = "because: embeddings have no posterior"
    refused(lambda: flat.because(TEST.x, TRAIN.x, TRAIN.names), words, kind=cc.UnsupportedError)
    for words, asked, x, y, k in (
        ("x, y: expected", TEST.x, TRAIN.x, np.roll(TRAIN.names, 1), 3),
        ("x, y: expected", TEST.x, TRAIN.x[::-1].copy(), TRAIN.names, 3),
        ("x, y: expected", TEST.x, HELD.x, HELD.names, 3),
        ("k: expected", TEST.x, TRAIN.x, TRAIN.names, 151),
        ("queries: expected at least one input", TEST.x[:0], TRAIN.x, TRAIN.names, 3),
    ):
        refused(partial(retriever.because, asked, x, y, k=k), words)
