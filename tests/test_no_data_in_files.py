"""No file that the package writes has a row of the user's data in it, but for those in docs/keep_and_serve.md.

Nor has it a line of the user's code, or a path of the user's machine.
"""

import importlib
import io
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh import ROOT
from laplace import Laplace
from tables import refused
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.fit.part_state import State

N, WIDTH = 160, 9
OPTIONS = {"pd_fix": "psd", "negative_samples": None}


def data(device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Rows that nothing else has: 100 to fit, 40 to calibrate, 20 to score."""
    torch.manual_seed(12)
    return torch.randn(N, WIDTH).to(device), torch.arange(N, device=device) % 4


class Encoder(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = super().forward(x)  # a line of the user
        return z


def new(device: str, structure: str = "kron_lowrank", weights: str = "last_layer") -> Any:
    torch.manual_seed(0)
    encoder = Encoder(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 3)).to(device)
    return Laplace(encoder, "contrastive", weights, structure, backend_kwargs=OPTIONS)


def fitted(device: str, structure: str = "kron_lowrank", weights: str = "last_layer") -> Any:
    x, labels = data(device)
    la = new(device, structure, weights)
    la.fit([(x[:50], labels[:50]), (x[50:100], labels[50:100])])
    la.optimize_prior_precision()
    la.calibrate([x[100:140]])
    return la


def parts(folder: Path, device: str) -> None:
    x, labels = data(device)
    shards = [[(x[:50], labels[:50])], [(x[50:100], labels[50:100])]]
    first = [new(device).part_statistics(shard, (k, 2)) for k, shard in enumerate(shards)]
    whole = State.merged(first)
    second = [new(device).part_curvature(shard, (k, 2), whole) for k, shard in enumerate(shards)]
    for number, state in enumerate([*first, whole, *second, State.merged(second)]):
        state.save(folder / f"{number}.safetensors")
    la = new(device)
    la.fit_parts(whole, State.merged(second))
    torch.save(la.state_dict(), folder / "fitted.pt")


def towers(folder: Path, device: str) -> None:
    x, _ = data(device)
    pair = cc.TwoTowers(new(device).model.model, new(device).model.model)
    la: Any = Laplace(pair, "contrastive", backend_kwargs={"loss": cc.InfoNCELoss()})
    la.fit([(x[:50], x[50:100])])
    la.optimize_prior_precision()
    la.save_pretrained(folder / "saved")
    torch.save(la.state_dict(), folder / "state.pt")


def report(folder: Path, device: str) -> None:
    x, labels = data(device)
    found = cc.report.evaluate(fitted(device), [(x[140:], labels[140:])], gallery=[(x[:100], labels[:100])], n_shown=0)
    found.save(folder / "report")


def online(folder: Path, device: str) -> None:
    x, labels = data(device)
    learner = cc.OnlineLaplace(new(device).model.model, probe=x[:4], n_data=N)
    learner(x, labels).backward()
    torch.save(learner.state_dict(), folder / "training.pt")
    la = learner.laplace()
    la.save_pretrained(folder / "saved")
    torch.save(la.state_dict(), folder / "state.pt")


def retriever(folder: Path, device: str) -> None:
    x, labels = data(device)
    encoder = new(device).model.model
    cc.Retriever(encoder).fit(x[:100], labels[:100], held_out=(x[100:], labels[100:])).save(folder / "retriever")


def embeddings(folder: Path, device: str) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    features = arrow.FixedSizeListArray.from_arrays(data()[0].flatten().numpy(), WIDTH)
    table = arrow.table({"features": features}).replace_schema_metadata({"written by": str(ROOT)})
    parquet.write_table(table, folder / "source")
    found = cc.io.jobs.EmbeddingFolder(folder / "found", fitted(device), cc.jobs.ParquetParts(folder / "source", 1))
    found.write(fitted(device), 0)
    (folder / "source").unlink()


def state(folder: Path, device: str) -> None:
    for weights, structure in (("last_layer", "diag"), ("last_layer", "full"), ("last_layer", "kron"), ("all", "diag")):
        torch.save(fitted(device, structure, weights).state_dict(), folder / f"{weights}-{structure}.pt")
    torch.save(fitted(device).state_dict(), folder / "default.pt")


def again(folder: Path, device: str) -> None:
    """Saved once more after loading."""
    la = fitted(device)
    other = cc.load_pretrained(la.save_pretrained(folder / "saved"), la.model.model)
    other.save_pretrained(folder / "again")
    other.export(folder / "again.pt2")


def exported(suffix: str, count: int = 0) -> Callable[[Path, str], Any]:
    """With the first rows as an example, or without one."""

    def write(folder: Path, device: str) -> None:
        fitted(device).export(folder / f"file{suffix}", data(device)[0][:count] if count else None)

    return write


FILES: dict[str, Callable[[Path, str], Any]] = {
    "graph": exported(".pt2"),
    "graph from an example": exported(".pt2", 2),
    "onnx": exported(".onnx", 2),
    "state": state,
    "pickle": lambda folder, device: (folder / "la.pkl").write_bytes(pickle.dumps(fitted(device))),
    "torch.save": lambda folder, device: torch.save(fitted(device), folder / "la.pt"),
    "saved posterior": lambda folder, device: fitted(device).save_pretrained(folder / "saved"),
    "saved again": again,
    "states of parts": parts,
    "two towers": towers,
    "report": report,
    "online": online,
    "retriever": retriever,
    "embeddings": embeddings,
}


def contents(path: Path) -> Iterator[bytes]:
    """A file, and what is compressed in it."""
    content = path.read_bytes()
    yield content
    if zipfile.is_zipfile(io.BytesIO(content)):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            yield from (archive.read(name) for name in archive.namelist())
    if path.suffix == ".parquet":
        table = importlib.import_module("pyarrow.parquet").read_table(path)
        yield f"{table.schema.metadata} {table.to_pydict()}".encode()


def rows_in(folder: Path, x: Tensor) -> dict[str, int]:
    """How many of the rows are in the files, in either precision or as text."""
    patterns = [
        [part.cpu().numpy().tobytes() for part in (row[:3].float(), row[:3].double())] + [repr(float(row[0])).encode()]
        for row in x
    ]
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        parts = list(contents(path))
        found[path.name] = sum(any(p in part for p in row for part in parts) for row in patterns)
    return found


HELD: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {
    "a saved posterior": (("saved posterior", "state", "graph"), {}),
    "`la.part_statistics(...)`": (("statistics",), {"outputs": 100}),
    "`la.part_curvature(...)`": (("curvature",), {"features": 100}),
    "a pickle of a whole posterior": (("pickle",), {"features": 100, "outputs": 100}),
}
"""Files by their row in docs/keep_and_serve.md, and how many of the 100 training points are in them."""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", FILES)
def test_no_row_of_the_data_and_nothing_of_the_machine_is_in_a_file(kind: str, device: str, tmp_path: Path) -> None:
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
    FILES[kind](tmp_path, device)
    found = rows_in(tmp_path, data()[0])
    assert found
    assert not any(found.values()) or kind in {kind for kinds, _ in HELD.values() for kind in kinds}, found
    for path in filter(Path.is_file, tmp_path.rglob("*")):
        for content in contents(path):
            for text in (str(ROOT), str(tmp_path), sys.prefix, Path(__file__).name, "a line of the user"):
                assert text.encode() not in content, f"{path.name} holds {text}"


def statistics(folder: Path, device: str) -> None:
    x, labels = data(device)
    new(device).part_statistics([(x[:100], labels[:100])], (0, 1)).save(folder / "statistics")


def curvature(folder: Path, device: str) -> None:
    x, labels = data(device)
    whole = State.merged([new(device).part_statistics([(x[:100], labels[:100])], (0, 1))])
    new(device).part_curvature([(x[:100], labels[:100])], (0, 1), whole).save(folder / "curvature")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_in_which_file(device: str, tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "keep_and_serve.md").read_text()
    table = page.partition("### What is in which file")[2].partition("\n\nA sample")[0]
    writers = FILES | {
        "statistics": statistics,
        "curvature": curvature,
    }
    x, encoder = data(device)[0], new(device).model.model
    with torch.no_grad():
        rows = {"inputs": x, "outputs": encoder(x[:100]), "features": encoder[:2](x[:100])}
    for name, (kinds, held) in HELD.items():
        (line,) = [line for line in table.splitlines() if line.startswith(f"| {name}")]
        for kind in kinds:
            folder = tmp_path / kind
            folder.mkdir()
            writers[kind](folder, device)
            found = {what: max(rows_in(folder, values).values()) for what, values in rows.items()}
            assert {what: count for what, count in found.items() if count} == held, kind
        assert all(what in line for what in held), line
        assert held or "no row" in line


class Headed(nn.Module):
    """Takes no made-up inputs: every point starts with a 7."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.head(x[:, 1:].where(x[:, :1] == 7, torch.nan))
        return z


def test_an_encoder_that_refuses_made_up_inputs_asks_for_an_example(device: str, tmp_path: Path) -> None:
    x, labels = torch.cat([torch.full((24, 1), 7.0), torch.randn(24, 2)], 1).to(device), torch.arange(24) % 3
    encoder = Headed().to(device)
    la: Any = Laplace(encoder, "contrastive", backend_kwargs={"pd_fix": "psd"})
    la.fit([(x, labels.to(device))])
    says = "example: expected inputs that the encoder takes, got none, and made-up ones fail: .*finite.*example="
    for path, write in (("saved", la.save_pretrained), ("la.pt2", la.export)):
        with pytest.raises(cc.InputError, match=says):
            write(tmp_path / path)
        write(tmp_path / path, example=x[:2])
    assert torch.equal(cc.load_pretrained(tmp_path / "saved", encoder)(x).mu, la(x).mu)
    fresh: Any = Laplace(encoder, "contrastive", backend_kwargs={"pd_fix": "psd"})
    refused(lambda: fresh.load_state_dict(la.state_dict()), "state_dict['data'] = x[:2]")
    fresh.load_state_dict({**la.state_dict(), "data": x[:2]})
    assert torch.equal(fresh(x).mu, la(x).mu)


def test_made_up_inputs_are_of_the_same_kind(device: str) -> None:
    made: Any = cc.network.inputs.made_up_inputs(
        {
            "ids": torch.tensor([[101, 2000, 3], [5, 102, 7], [30000, 1, 2]], device=device),
            "mask": torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]], device=device),
            "types": torch.zeros(3, 3, dtype=torch.int64, device=device),
            "pixels": torch.randn(3, 2, 2, dtype=torch.float16, device=device),
            "scale": torch.tensor(3.0, device=device),
            "hash": torch.tensor([[2**63 - 1], [-(2**63)], [5]], device=device),
            "below": torch.tensor([[-7], [-3], [-5]], device=device),
            "mode": "text",
            "names": ["Jane", "John", "Ann"],
        }
    )
    assert set(made) == {"ids", "mask", "types", "pixels", "scale", "hash", "below", "mode"}
    assert made["ids"].shape == (2, 3)
    assert 0 <= int(made["ids"].min()) <= int(made["ids"].max()) <= 2000
    assert made["mask"].tolist() == [[1, 1, 1]] * 2
    assert not made["types"].any()
    assert made["pixels"].dtype == torch.float16
    assert 0 <= float(made["pixels"].min()) < float(made["pixels"].max()) <= 1
