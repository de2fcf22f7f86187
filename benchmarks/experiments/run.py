"""Command line of the experiments: cells one after the other, fit, evaluate, write; what is finished is not done again.

``config.json`` of the run folder says what the run was made with. A cell, one row and seed, leaves its figures in
``seedN/ROW.json``, written last, and what plots need in ``seedN/ROW.pt``. What several rows of a seed build on, the
deterministic encoder or a training of online LAM, is in ``seedN/encoder.pt`` or ``seedN/online*.pt``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import nn
from tqdm import tqdm

from benchmarks.experiments.data import DATASETS, RetrievalData, encoder_file, hold_out, load_data, load_pretrained
from benchmarks.experiments.evaluate import by_released_code, evaluate
from benchmarks.experiments.methods import METHODS, ON_ENCODER, ON_ONLINE
from benchmarks.experiments.methods.laplace import online_step
from benchmarks.experiments.plan import DEMO, TABLE_DATA, Cell, defaults_of, known_rows, plan_cells, table_rows
from benchmarks.experiments.report import FORMAT, write_report
from benchmarks.experiments.training import PROTOCOLS, Fitted, Setting, new_encoder, train
from benchmarks.machine import describe, write_atomically
from benchmarks.transfer.feature_file import save_features
from benchmarks.transfer.recipes.faces import TABLE_ENCODERS
from contrastive_curvature.artifact import write_whole
from contrastive_curvature.errors import ContrastiveCurvatureError, InputError

_MOST_HELD_OUT = 2_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment of one table, or go on with it.

    Returns:
        Exit status: 0; 1 when a cell failed; 2 when something was refused; 130 when it was interrupted.
    """
    started = time.perf_counter()
    given = parse(argv)
    try:
        rows = table_rows(given.table, given.methods, given.posterior, given.encoder is not None)
        if given.threads is not None:
            torch.set_num_threads(given.threads)
        data = read_data(given)
        open_run(given, data)
        cells = plan_cells(rows, given.seeds)
        sizes = f"{len(data.train):,} training, {len(data.test):,} test images"
        outside = f"{len(data.ood or ()):,} ({data.ood_title})"
        print(f"{data.title}: {sizes}; out of distribution: {outside}; {len(cells)} cells. Run folder: {given.out}")
        text, failed = run(given, data, cells)
    except ContrastiveCurvatureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ninterrupted; start again with the same options to go on (--out {given.out})", file=sys.stderr)
        return 130
    seconds = time.perf_counter() - started
    print(f"\n{text}\n{seconds:.0f} seconds in all; figures and seed {given.seeds[0]}'s plots in\n{given.out}")
    return int(failed)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read arguments, with the defaults of table and data set."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experiments",
        description="Train, predict, score, and compare: the tables of Warburg et al. (2023) beside the paper's "
        "figures, or the demonstration. A run that was interrupted goes on when it is started again with the same "
        "options.",
        epilog=f"Rows (--methods). Table 1: {_row_names('1')}. The others: {_row_names('2')}.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--table", choices=TABLE_DATA, required=True, help="of the paper, or the demonstration")
    shown = "; ".join(f"{table}: {', '.join(names)}" for table, names in TABLE_DATA.items())
    add("--data", help=f"data set, the table's first by default ({shown})")
    encoder = "the rows that train nothing, of a pretrained encoder: its feature file (docs/results.md), which stands "
    encoder += f"for images and network, or one that is made in the run folder: {', '.join(TABLE_ENCODERS)} (lfw)"
    add("--encoder", metavar="FILE.npz", help=encoder)
    outside = ", ".join(name for name in DATASETS if name != "folder")
    ood = f"out of distribution (default: the paper's): {outside}, none; of --encoder: an unknown set of the file "
    add("--ood", metavar="NAME", help=f"{ood}(default: its first), none")
    which = "of LAM's rows: diag is the paper's diagonal and score, default this library's (default: both)"
    add("--posterior", choices=("diag", "default"), help=which)
    protocol = "choose checkpoints on held-out training images (clean), never (paper), or train and choose as the "
    protocol += "released code does, on the test images (default: clean; the demonstration: paper)"
    add("--protocol", choices=PROTOCOLS, help=protocol)
    add("--methods", nargs="+", metavar="ROW", help="rows (default: all but those in brackets, see below)")
    add("--seeds", type=int, nargs="+", default=[0], metavar="SEED", help="several give mean ± deviation (default: 0)")
    add("--train-size", type=int, metavar="N", help="training images (default: all)")
    add("--test-size", type=int, metavar="N", help="test images, in and out of distribution each (default: all)")
    add("--dim", type=int, metavar="D", help="latent dimension (default: the paper's; Omniglot 32)")
    passes = "passes over the training images (default: the paper's; digits 15, the demonstration of 60,000 images 3)"
    add("--epochs", type=int, metavar="N", help=passes)
    add("--batch-size", type=int, metavar="N", default=64, help="images a training step (default: %(default)s)")
    weights = "of ResNet-50: hub (torchvision's of ImageNet), none, or a file of its state (default: %(default)s)"
    add("--weights", default="hub", help=weights)
    add("--image-size", type=int, default=224, metavar="PIXELS", help="side of photographs (default: %(default)s)")
    precision = "of the forward passes in training (default: %(default)s); bfloat16 is many times slower on a "
    precision += "processor without instructions for it, AMX or AVX512_BF16"
    add("--precision", choices=("float32", "bfloat16"), default="float32", help=precision)
    memory = "what online LAM forgets in a step, alpha of Eq. 5 (default: the paper's 1e-4; protocol released: 1e-3)"
    add("--memory-factor", type=float, metavar="ALPHA", help=memory)
    add("--n-samples", type=int, default=100, metavar="N", help="samples for scores and votes (default: %(default)s)")
    passes = "passes of MC dropout at most, for which a sample is a pass of the whole network (default: no limit)"
    add("--dropout-passes", type=int, metavar="N", help=passes)
    add("--data-root", type=Path, default=Path("data"), metavar="DIR", help="of all data sets (default: %(default)s)")
    add("--download", action="store_true", help="fetch files that are missing (the demonstration does so)")
    out = "run folder; one with the same options is gone on with (default: runs/tableN-DATA, runs/DATA-TIME for demo)"
    add("--out", type=Path, metavar="DIR", help=out)
    add("--device", default="cpu", help="where torch computes (default: %(default)s)")
    add("--threads", type=int, metavar="N", help="of torch on the CPU (default: torch's)")
    add("--quiet", action="store_const", const=False, dest="progress", help="no progress bars")
    given = parser.parse_args(argv)
    given.data = given.data or TABLE_DATA[given.table][0]
    if given.data not in TABLE_DATA[given.table]:
        parser.error(f"--data: expected for table {given.table} one of {', '.join(TABLE_DATA[given.table])}")
    if given.encoder:
        if given.table in (DEMO, "4"):
            parser.error("--encoder: expected table 1, 2 or 3")
        if not given.encoder.endswith(".npz") and (given.encoder not in TABLE_ENCODERS or given.data != "lfw"):
            parser.error(f"--encoder: expected FILE.npz, or with --data lfw: {', '.join(TABLE_ENCODERS)}")
    if not given.encoder and given.ood not in (*DATASETS, "none", None):
        parser.error(f"--ood: expected one of {outside}, none")
    for name, value in defaults_of(given.table, given.data).items():
        setattr(given, name, getattr(given, name, None) or value)
    given.protocol = given.protocol or ("paper" if given.table == DEMO or given.encoder else "clean")
    given.memory_factor = given.memory_factor or PROTOCOLS[given.protocol].memory_factor
    if given.out is None:
        time_now = f"{datetime.now().astimezone():%Y%m%d-%H%M%S}"
        name = f"{given.data}-{time_now}" if given.table == DEMO else f"table{given.table}-{given.data}"
        given.out = Path("runs", name)
    return given


def _row_names(table: str) -> str:
    return ", ".join(row.key if row.default else f"[{row.key}]" for row in known_rows(table))


def settings(given: argparse.Namespace) -> Setting:
    """How all methods of the run are trained."""
    known = {name: value for name, value in vars(given).items() if name in Setting.__dataclass_fields__}
    return Setting(**known, own_order=given.table == DEMO)


def read_data(given: argparse.Namespace) -> RetrievalData:
    """Load the data sets, with what the protocol chooses checkpoints on.

    Of the demonstration's a fifth of the training images is held out, to calibrate with.
    """
    sizes = (given.train_size, given.test_size)
    if given.encoder is not None:
        file = encoder_file(given.encoder, given.out)
        if given.encoder in TABLE_ENCODERS and not file.is_file():
            print(f"{given.encoder}: making its features", flush=True)
            save_features(file, TABLE_ENCODERS[given.encoder](given.data_root, 0))
        data = load_pretrained(file, DATASETS[given.data].title, *sizes, given.ood)
        # For the run's config and its page.
        vars(given).update(network=given.encoder, dim=data.head.out_features, epochs=0, per_class=None)
        return data
    download = given.download or given.table == DEMO
    data = load_data(given.data, given.data_root, *sizes, download, given.ood, given.image_size)
    chosen_on = PROTOCOLS[given.protocol].chosen_on
    if chosen_on == "held":
        data = hold_out(data)
    if chosen_on == "test":
        data = dataclasses.replace(data, selection=data.test)
    if given.table != DEMO:
        return data
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(2))
    held = min(_MOST_HELD_OUT, len(order) // 5)
    kept = data.train.take(order[held:].sort().values)
    return dataclasses.replace(data, train=kept, calibration=data.train.take(order[:held]))


def open_run(given: argparse.Namespace, data: RetrievalData) -> None:
    """Make the run folder, or check that the one that is there was made with the same options, of the same images.

    Seeds, rows and how to compute may differ from those it was made with.
    """
    wanted = identity(given) | {"images": data.fingerprint(), "format": FORMAT}
    path = given.out / "config.json"
    if path.is_file() and (there := json.loads(path.read_text(encoding="utf-8"))) != wanted:
        differ = [name for name in wanted | there if wanted.get(name) != there.get(name)]
        was, got = (", ".join(f"{name} = {of.get(name)!r}" for name in differ) for of in (there, wanted))
        hint = "Name another --out, or give the same options to go on."
        raise InputError(f"--out {given.out}", f"options as the run there: {was}", got, hint)
    given.out.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(wanted, indent=1) + "\n")


def identity(given: argparse.Namespace) -> dict[str, Any]:
    """What a run folder must agree on to be resumed, as JSON has it."""
    setting = dataclasses.asdict(settings(given))
    kept = {name: value for name, value in setting.items() if name not in ("progress", "own_order")}
    named = {name: getattr(given, name) for name in ("table", "data", "ood", "train_size", "test_size")}
    return named | kept


def run(given: argparse.Namespace, data: RetrievalData, cells: Sequence[Cell]) -> tuple[str, bool]:
    """Compute what is missing, and report after every cell.

    Returns:
        The tables, in Markdown, and whether a method raised an error of the library's.
    """
    from benchmarks.experiments.plots import draw_all

    setting, failed, text = settings(given), False, ""
    bases: dict[tuple[str, int], tuple[nn.Module, float]] = {}
    device = torch.device(given.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    machine = describe() | {"device": given.device, "accelerator": name}
    # A forward pass, so that the first prediction that is timed does not pay for the start of the device.
    encoder = new_encoder(setting) if data.head is None else data.head.to(device)
    with torch.no_grad():
        encoder.eval()(data.test.images(range(len(data.test))[:200]).to(device)).cpu()
    for number, cell in enumerate(cells):
        path = given.out / f"seed{cell.seed}" / f"{cell.row.key}.json"
        last = number + 1 == len(cells)
        there = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"failed": "not begun"}
        if new := "failed" in there or there["members"] != list(cell.members):
            tqdm.write(f"seed {cell.seed}, {cell.row.key}")
            path.parent.mkdir(exist_ok=True)
            content: dict[str, Any] = {"row": cell.row.key, "seed": cell.seed, "members": list(cell.members)}
            try:
                method, seconds = fit(given, data, cell, bases)
                found = evaluate(method, data, n_votes=setting.n_samples, seed=cell.seed)
                if given.protocol == "released":
                    found = by_released_code(found)
            except ContrastiveCurvatureError as error:
                # One method that diverges on one seed says nothing against the others.
                tqdm.write(f"seed {cell.seed}, {cell.row.key} failed: {error}", file=sys.stderr)
                failed, content["failed"] = True, f"{type(error).__name__}: {error}"
            else:
                write_whole(path.with_suffix(".pt"), lambda file, curves=found.curves: torch.save(curves, file))
                content |= {"method": cell.row.method, "options": cell.row.options, "figures": found.figures}
                content |= {"variants": found.variants, "seconds": {"fit": seconds} | found.seconds, "machine": machine}
            write_atomically(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
        if last or new:
            text = write_report(given.out, identity(given), data)
        if last:
            draw_all(given.out, data, given.table, given.seeds[0])
    return text, failed


def fit(
    given: argparse.Namespace, data: RetrievalData, cell: Cell, bases: dict[tuple[str, int], tuple[nn.Module, float]]
) -> tuple[Fitted, float]:
    """The cell's method, and the seconds of all fits that it needed and the other methods did not."""
    setting, row, name, make_step = settings(given), cell.row, "encoder", None
    if row.method in ON_ONLINE:
        curvature = {key: value for key, value in row.options.items() if key != "posterior"}
        name, make_step = "_".join(["online", *curvature.values()]), online_step(setting, data, **curvature)
    seeds = cell.members or ((cell.seed,) if row.method in ON_ENCODER or make_step else ())
    for seed in seeds:
        if (name, seed) not in bases:
            bases[name, seed] = _trained(given, data, seed, name, make_step)
    started = time.perf_counter()
    encoders = [bases[name, seed][0] for seed in seeds]
    fitted = METHODS[row.method](setting, data, cell.seed, encoders, **row.options)
    seconds = time.perf_counter() - started
    own = cell.members or row.method == "deterministic" or make_step
    return fitted, seconds + (sum(bases[name, seed][1] for seed in seeds) if own else 0.0)


def _trained(
    given: argparse.Namespace, data: RetrievalData, seed: int, name: str, make_step: Callable[..., nn.Module] | None
) -> tuple[nn.Module, float]:
    """The encoder of a seed, or the step of ``make_step``: trained, loaded or pretrained; the seconds it trained."""
    if data.head is not None:
        return data.head, 0.0
    setting, path = settings(given), given.out / f"seed{seed}" / f"{name}.pt"
    path.parent.mkdir(exist_ok=True)
    # Several processes may want the same one: one trains it, the others wait and load it.
    with FileLock(path.with_suffix(".lock")):
        if path.is_file():
            saved = torch.load(path, map_location=given.device, weights_only=True)
            step = train(dataclasses.replace(setting, epochs=0), data, seed, make_step)
            step.load_state_dict(saved["step"])
        else:
            started = time.perf_counter()
            step = train(setting, data, seed, make_step)
            saved = {"step": step.state_dict(), "seconds": time.perf_counter() - started}
            write_whole(path, lambda file: torch.save(saved, file))
    return (step.encoder if make_step is None else step), saved["seconds"]
