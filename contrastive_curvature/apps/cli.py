"""How sure is an embedding? Answers for arrays in .npz files.

numpy.savez("train.npz", features=features, labels=labels, weight=weight, bias=bias) writes a file with the arrays
  features (N, F)    inputs of the encoder's last linear layer
  weight, bias       (D, F) and (D,), in FILE: the layer; an embedding is features @ weight.T + bias
  embeddings (N, D)  in place of these three: the last layer is then the identity
  labels (N,)        classes: whole numbers in all files, or names in all files
  ids (N,)           numbers or names of the inputs, optional
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import inspect
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import contrastive_curvature as cc  # public names alone; torch is imported after the arguments are parsed

LAYER = "last_layer.npz"
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of texts that a spreadsheet runs."""


def load(path: str | Path) -> dict[str, Any]:
    """Read all arrays of a file."""
    import numpy as np

    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except OSError:
        raise
    except Exception as error:  # numpy, zipfile and zlib raise many kinds of errors for damaged files
        hint = "numpy.savez writes one. Save names as labels.astype(str), not as objects."
        raise cc.InputError(str(path), "an .npz without objects", f"what cannot be read ({error})", hint) from error


def array(path: str | Path, file: dict[str, Any], name: str, *shape: int, named: bool = False) -> Any:
    """Return an array of a file as float32, or whole numbers or names; -1 in the shape is any length."""
    import numpy as np

    if name not in file:
        raise cc.InputError(str(path), f"the array {name}", ", ".join(file) or "nothing")
    found = file[name]
    fits = len(found.shape) == len(shape) and all(n in (-1, m) for n, m in zip(shape, found.shape, strict=True))
    if not fits or not found.size or found.dtype.kind not in ("iuU" if named else "iuf"):
        wanted = f"{'whole numbers or names' if named else 'numbers'} of shape {str(shape).replace('-1', 'N')}"
        raise cc.InputError(f"{path}: {name}", wanted, f"{found.dtype} of shape {found.shape}")
    if named:
        return found if found.dtype.kind == "U" else found.astype(np.int64)
    return found.astype(np.float32)


def read_layer(path: str | Path) -> dict[str, Any]:
    """Return ``weight`` and ``bias`` of the last layer, and the ``kind`` of its inputs."""
    import numpy as np

    file = load(path)
    if "embeddings" in file and "features" not in file:
        width = array(path, file, "embeddings", -1, -1).shape[1]
        return {"kind": "embeddings", "weight": np.eye(width, dtype="f4"), "bias": np.zeros(width, "f4")}
    weight = array(path, file, "weight", -1, -1)
    bias = array(path, file, "bias", len(weight)) if "bias" in file else np.zeros(len(weight), "f4")
    return {"kind": str(file.get("kind", "features")), "weight": weight, "bias": bias}


def read(path: str, layer: dict[str, Any], *, labels: bool = False) -> dict[str, Any]:
    """Return inputs ``x`` of the last layer, their ``ids``, and the ``labels`` that are asked for."""
    import numpy as np

    file, kind = load(path), layer["kind"]
    x = array(path, file, kind, -1, layer["weight"].shape[1])
    for name in ("weight", "bias") if kind == "features" else ():
        if name in file and not np.array_equal(file[name].astype("f4"), layer[name]):
            raise cc.InputError(f"{path}: {name}", "that of the fit, or none", "another one")
    found = {"x": x, "ids": array(path, file, "ids", len(x), named=True) if "ids" in file else np.arange(len(x))}
    return {**found, "labels": array(path, file, "labels", len(x), named=True)} if labels else found


def last_layer(layer: dict[str, Any]) -> Any:
    """Return the last layer as a module."""
    import torch

    module = torch.nn.Linear(*layer["weight"].shape[::-1])
    module.load_state_dict({name: torch.from_numpy(layer[name]) for name in ("weight", "bias")})
    return module.eval()


def batches(*columns: Any) -> list[Any]:
    """Return batches of one array, or of inputs and labels."""
    import torch

    return list(zip(*(torch.from_numpy(column).split(512) for column in columns), strict=True))


def numbered(*columns: Any) -> tuple[list[Any], list[str] | None]:
    """Return labels as numbers that agree between files, and the names of the numbers, if labels are names."""
    import numpy as np

    if len({column.dtype.kind == "U" for column in columns}) > 1:
        raise cc.InputError("labels", "whole numbers in all files, or names in all files", "both")
    if columns[0].dtype.kind != "U":
        return list(columns), None
    names = np.unique(np.concatenate(columns))
    return [np.searchsorted(names, column) for column in columns], names.tolist()


def posterior(layer: dict[str, Any], x: Any, labels: Any, known: Any = None) -> Any:
    """Fit a posterior, and calibrate it if there are known inputs to compare with."""
    from laplace import Laplace

    la = Laplace(last_layer(layer), "contrastive")
    la.fit(batches(x, labels))
    la.optimize_prior_precision()
    if known is not None:
        la.calibrate(batches(known))
    return la


@contextlib.contextmanager
def complete(out: str, kind: str) -> Iterator[Path]:
    """Yield a path; what is written there gets the name ``out`` when it is complete, and vanishes after an error."""
    target = Path(os.path.realpath(out))
    if not target.parent.is_dir() or (target.exists() and (kind == "folder" or not target.is_file())):
        got = "one that exists" if target.exists() else f"no folder {target.parent}"
        raise cc.InputError(f"--out {out}", f"a new {kind} in a folder that exists", got, "Name another.")
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=target.parent) as place:
        yield Path(place) / target.name
        os.replace(Path(place) / target.name, target)


def fit(args: argparse.Namespace) -> None:
    """Fit a posterior, or a retriever, and save it with the last layer.

    Without --held-out, FOLDER holds a posterior: an uncertainty for every input, and with --calibrate p-values.
    With --held-out it holds a retriever that searches FILE: it answers, is unsure, or calls a query unknown.

    Example: contrastive-curvature fit train.npz --out posterior --calibrate known.npz
    """
    import numpy as np

    asked = {name: getattr(args, name) for name in ("wrong_answers", "false_matches", "false_alarms")}
    rates: dict[str, Any] = {name: None if rate == 1 else rate for name, rate in asked.items() if rate is not None}
    if rates and not args.held_out:
        raise cc.InputError("--held-out", f"a file beside --{next(iter(rates)).replace('_', '-')}", "none")
    if args.calibrate and args.held_out:
        raise cc.InputError("--calibrate", "nothing beside --held-out, whose queries calibrate too", args.calibrate)
    layer = read_layer(args.file)
    train = read(args.file, layer, labels=True)
    with complete(args.out, "folder") as folder:
        if args.held_out:
            held = read(args.held_out, layer, labels=True)
            numbered(train["labels"], held["labels"])
            retriever = cc.Retriever(last_layer(layer), **rates)
            retriever.fit(train["x"], train["labels"], held_out=(held["x"], held["labels"])).save(folder)
            print(retriever)
        else:
            known = read(args.calibrate, layer)["x"] if args.calibrate else None
            (labels,), _ = numbered(train["labels"])
            posterior(layer, train["x"], labels, known).save_pretrained(folder)
            print(f"{len(train['x']):,} inputs; {'no ' if known is None else ''}p-values")
        np.savez(folder / LAYER, **layer)


def answer(args: argparse.Namespace) -> None:
    """Write a table of answers, or of uncertainties and p-values.

    Of a retriever: id, decision (answer, unsure or unknown), label and neighbour (class and row in FILE of the nearest
    point), confidence (probability that it is right), p_value. Of a posterior: id, uncertainty (radians), and if it is
    calibrated novelty, p_value (share of known inputs that are at least as novel) and known (p_value > alpha).
    An apostrophe stands before a text that a spreadsheet would run as a formula.

    Example: contrastive-curvature answer posterior new.npz --out answers.csv
    """
    folder = Path(args.folder)
    retrieves = (folder / "retriever.safetensors").exists()
    if not (folder / LAYER).exists():
        raise cc.InputError(args.folder, "a folder of contrastive-curvature fit", f"no {LAYER} in it", "Fit again.")
    if not args.out.endswith(".csv"):
        raise cc.InputError("--out", "a name that ends in .csv", args.out)
    if retrieves and args.alpha is not None:
        raise cc.InputError("--alpha", "nothing for a retriever, whose fit had --false-alarms", args.alpha)
    layer = read_layer(folder / LAYER)
    new = read(args.new, layer)
    columns = {"id": new["ids"]}
    if retrieves:
        columns |= vars(cc.Retriever.load(folder, last_layer(layer))(new["x"]))
    else:
        embedding = cc.load_pretrained(folder, last_layer(layer)).predict(new["x"])
        columns["uncertainty"] = embedding.uncertainty.numpy()
        with contextlib.suppress(cc.NotFittedError):  # without --calibrate
            known = embedding.is_known(0.01 if args.alpha is None else args.alpha)
            columns |= {"novelty": embedding.novelty.numpy(), "p_value": embedding.p_value.numpy()}
            columns["known"] = ["true" if one else "false" for one in known]
    with complete(args.out, "file") as path, path.open("x", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(columns)
        for row in zip(*columns.values(), strict=True):
            table.writerow(f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell for cell in row)


def report(args: argparse.Namespace) -> None:
    """Fit and calibrate a posterior, and write the page of its evaluation.

    A fifth of FILE is held back for each of --calibrate and --test that is not given, the same inputs in every run, and
    the posterior is fitted to the rest. If the encoder was trained on them, the numbers are too good: give files with
    inputs that it was not trained on. Neighbours are searched among the test inputs. The page shows ids and classes.

    Example: contrastive-curvature report train.npz --calibrate known.npz --test test.npz --out report
    """
    import numpy as np

    layer = read_layer(args.file)
    train = read(args.file, layer, labels=True)
    order, n = np.random.default_rng(0).permutation(len(train["x"])), len(train["x"])
    parts = np.split(order, [n - n // 5 * 2, n - n // 5])
    rest = [{name: column[np.sort(rows)] for name, column in train.items()} for rows in parts]
    known = read(args.calibrate, layer) if args.calibrate else rest.pop()
    test = read(args.test, layer, labels=True) if args.test else rest.pop()
    train = {name: np.concatenate([part[name] for part in rest]) for name in train}
    (labels, of_test), names = numbered(train["labels"], test["labels"])
    unknown = read(args.unknown, layer) if args.unknown else None
    evaluation = cc.report.evaluate(
        posterior(layer, train["x"], labels, known["x"]),
        cc.report.Data(batches(test["x"], of_test), ids=test["ids"]),
        unknown=None if unknown is None else cc.report.Data(batches(unknown["x"]), ids=unknown["ids"]),
        class_names=names,
    )
    print(evaluation.save(args.out)["report.html"])


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments of a command; ``run`` is its function."""
    about, _, arrays = str(__doc__).partition("\n\n")
    gone = "Gone since 0.2: score, search (now answer), evaluate (now report) and others, see CHANGELOG.md."
    parser = argparse.ArgumentParser("contrastive-curvature", description=about, epilog=gone)
    parser.add_argument("--version", action="version", version=f"%(prog)s {cc.__version__}")
    commands, raw = parser.add_subparsers(required=True, metavar="COMMAND"), argparse.RawDescriptionHelpFormatter
    add: dict[str, Callable[..., Any]] = {}
    for run in (fit, answer, report):
        text = str(inspect.getdoc(run))
        options: dict[str, Any] = {"description": text, "epilog": arrays, "formatter_class": raw}
        command = commands.add_parser(run.__name__, help=text.partition("\n")[0], **options)
        command.set_defaults(run=run)
        add[run.__name__] = command.add_argument
    for name, out in (("fit", "a new folder"), ("report", "a new folder, or one with an earlier report")):
        add[name]("file", metavar="FILE.npz", help="training data of the encoder, and its last layer")
        add[name]("--out", metavar="FOLDER", required=True, help=out)
        add[name]("--calibrate", metavar="KNOWN.npz", help="inputs that did not train the encoder, for p-values")
    add["fit"]("--held-out", metavar="HELD_OUT.npz", help="queries with labels, which did not train the encoder")
    share: dict[str, Any] = {"metavar": "SHARE", "type": float}
    add["fit"]("--wrong-answers", help="of the answers may be wrong (0.02; 1: no limit)", **share)
    add["fit"]("--false-matches", help="of queries of other classes may be answered (0.05; 1: no limit)", **share)
    add["fit"]("--false-alarms", help="of the queries may be called unknown (0.01; 1: no limit)", **share)
    add["answer"]("folder", metavar="FOLDER", help="the folder that fit wrote")
    add["answer"]("new", metavar="NEW.npz", help="inputs; labels are not used")
    add["answer"]("--out", metavar="ANSWERS.csv", required=True, help="the table; an earlier one is replaced")
    add["answer"]("--alpha", help="of known inputs may be called unknown by a posterior (0.01)", **share)
    add["report"]("--test", metavar="TEST.npz", help="known inputs to measure, with labels")
    add["report"]("--unknown", metavar="UNKNOWN.npz", help="inputs of kinds that the encoder does not know")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for wrong usage or input, with one line on stderr."""
    args = parsed(argv)

    def say(kind: str, message: object) -> None:
        line = " ".join(str(message).split())
        print(f"{kind}: {''.join(each if each.isprintable() else '?' for each in line)}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: say("warning", message)
        try:
            args.run(args)
        except (cc.ContrastiveCurvatureError, OSError) as error:
            say("error", error)
            return 2
    return 0
