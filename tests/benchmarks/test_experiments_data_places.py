import csv

import pytest
import torch
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from benchmarks.experiments.data import load_data
from benchmarks.experiments.data.places import CITY_SPACING, TEST_CITIES, TRAINING_CITIES, WithinMetres

COLUMNS = ["", "key", "easting", "northing", "control_panel", "unique_cluster", "night", "view_direction"]
RAW = ["", "key", "lon", "lat", "ca", "captured_at", "pano"]


def write_table(path, header, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def write_side(folder, frames):
    """Frames (key, easting, northing, pano) as Mapillary publishes them."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for key, *_ in frames:
        Image.new("RGB", (6, 4)).save(folder / "images" / f"{key}.jpg")
    rows = [[n, key, e, u, False, n, False, "Forward"] for n, (key, e, u, _) in enumerate(frames)]
    write_table(folder / "postprocessed.csv", COLUMNS, rows)
    write_table(folder / "raw.csv", RAW, [[n, f[0], 0.1, 0.2, 0, "2019-01-01", f[3]] for n, f in enumerate(frames)])


EAST, NORTH = 347000.0, 6173000.0  # UTM coordinates of the size of Copenhagen's
QUERIES = [("q0", EAST, NORTH, False), ("q1", EAST + 1000, NORTH, False), ("q2", EAST, NORTH + 1, True)]
DATABASE = [("d0", EAST, NORTH + 24.9, False), ("d1", EAST + 1000, NORTH + 25.1, False), ("d2", EAST, NORTH, True)]


@pytest.fixture
def msls(tmp_path):
    """All cities, at the same coordinates. In each, one query has one right answer."""
    root = tmp_path / "msls" / "train_val"
    for city in (*TRAINING_CITIES, *TEST_CITIES):
        write_side(root / city / "query", QUERIES)
        write_side(root / city / "database", DATABASE)
    return tmp_path


def test_msls_leaves_out_panoramas_and_queries_without_an_answer(msls):
    data = load_data("msls", msls, image_size=8)
    assert (data.ood, data.train_plain, data.open_set) == (None, None, True)
    assert (len(TRAINING_CITIES), len(set(TRAINING_CITIES) | set(TEST_CITIES))) == (22, 24)
    assert len(data.train) == 22 * 4  # queries and database
    assert [f"{p.parts[-4]} {p.stem}" for p in data.test.paths] == ["cph q0", "sf q0"]
    assert [f"{p.parts[-4]} {p.stem}" for p in data.gallery.paths] == ["cph d0", "cph d1", "sf d0", "sf d1"]
    assert data.test.targets.dtype == torch.float64
    assert data.train.images([0, 5]).shape == (2, 3, 8, 8)
    # equal coordinates in another city are another place
    relevant, other = data.relevance(data.test.targets, data.gallery.targets)
    assert relevant.tolist() == [[True, False, False, False], [False, False, True, False]]
    assert torch.equal(other, ~relevant)
    assert (data.test.targets[0] - data.gallery.targets[0]).abs().tolist() == pytest.approx([0, 24.9], abs=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@given(
    seed=st.integers(0, 2**31),
    city_number=st.integers(0, 29),
    radii=st.tuples(st.floats(1, 50), st.floats(0, 50)),
)
def test_places_are_exact_far_from_the_origin(device, seed, city_number, radii):
    # enough points for torch's product form of the distance, which would be off by metres here
    near = torch.rand(40, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 100
    far = near + torch.tensor([EAST + city_number * CITY_SPACING, NORTH], dtype=torch.float64)
    relation = WithinMetres(radii[0], radii[0] + radii[1])
    positive, negative = (mask.cpu() for mask in relation(far.to(device), far.to(device)))
    metres = (near.unsqueeze(1) - near).square().sum(2).sqrt()
    clear = ((metres - relation.positive).abs() > 1e-5) & ((metres - relation.negative).abs() > 1e-5)
    assert torch.equal(positive[clear], (metres <= relation.positive)[clear])
    assert torch.equal(negative[clear], (metres > relation.negative)[clear])
    assert torch.equal(positive, positive.T)
    assert torch.equal(negative, negative.T)
