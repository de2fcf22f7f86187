"""N-digit MNIST and batches of pairs, on digits of random pixels."""

from __future__ import annotations

import gzip
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, chisquare

from benchmarks.experiments.data.ndigit import NDigitData, compose_ndigit, load_ndigit
from benchmarks.experiments.data.ndigit_split import NDigitSplit
from benchmarks.experiments.data.pair_batches import PairBatches
from benchmarks.experiments.data.split import FileSplit, TensorSplit, loader
from contrastive_curvature import InputError

PER_DIGIT = 7
SIZES = {"train_size": 2000, "seen_size": 1400, "novel_size": 600}


def fake(seed: int, low: int, high: int) -> TensorSplit:
    """Images of random pixels from low to high, in random order."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(10).repeat(PER_DIGIT)[torch.randperm(10 * PER_DIGIT, generator=generator)]
    pixels = torch.randint(low, high, (len(labels), 1, 28, 28), generator=generator, dtype=torch.uint8)
    return TensorSplit(pixels, labels)


# Pixels from 1 to 99 are training's, pixels above are the test set's, and 0 is an occlusion's.
TRAIN, TEST = fake(0, 1, 100), fake(1, 100, 256)


def compose(n: int = 2, seed: int = 0, **sizes: int) -> NDigitData:
    return compose_ndigit(TRAIN, TEST, n, seed=seed, **(SIZES | sizes))


def parts(data: NDigitData) -> dict[str, NDigitSplit]:
    return {name: value for name, value in vars(data).items() if isinstance(value, NDigitSplit)}


@pytest.fixture(scope="module", params=[2, 3])
def data(request: pytest.FixtureRequest) -> tuple[int, NDigitData]:
    return request.param, compose(request.param)


def test_sizes_and_classes(data):
    n, made = data
    assert {name: len(part) for name, part in parts(made).items()} == {
        "train": 2000,
        "seen_clean": 1400,
        "seen_corrupt": 1400,
        "novel_clean": 600,
        "novel_corrupt": 600,
    }
    assert (len(made.seen), len(made.novel)) == {2: (70, 30), 3: (700, 300)}[n]
    assert torch.equal(torch.cat([made.seen, made.novel]).sort().values, torch.arange(10**n))
    for name, part in parts(made).items():
        classes, counts = part.targets.unique(return_counts=True)
        assert torch.equal(classes, made.novel if name.startswith("novel") else made.seen)
        assert int(counts.max() - counts.min()) <= 1
        assert part.images([0, 1]).shape == (2, 1, 28, 28 * n)


def test_images_are_the_digits_of_their_label_from_the_right_half_of_mnist(data):
    n, made = data
    for name, part in parts(made).items():
        source = TRAIN if name == "train" else TEST
        pixels = part.pixels(range(len(part)))
        tiles = pixels.view(len(part), 28, n, 28).transpose(1, 2)
        assert tiles.dtype == torch.uint8
        shown = source.targets[part.rows]
        assert torch.equal((shown * 10 ** torch.arange(n - 1, -1, -1)).sum(1), part.targets)
        there = tiles > 0
        assert torch.equal(tiles[there], source.pixels[part.rows, 0][there])
        assert bool(there.all()) == name.endswith("clean")
        low, high = (1, 99) if name == "train" else (100, 255)
        assert low <= int(tiles[there].min())
        assert int(tiles[there].max()) <= high
        used = part.rows.unique()
        assert len(used) == 10 * PER_DIGIT
        torch.testing.assert_close(part.images([3])[0], pixels[3].float() / 255)


def test_an_image_is_built_digit_by_digit(data):
    _, made = data
    for part in parts(made).values():
        for row in (0, len(part) - 1):
            tiles = []
            for source, (side, top, left) in zip(part.rows[row], part.patches[row].tolist(), strict=True):
                tile = part.digits[source].clone()
                tile[top : top + side, left : left + side] = 0
                tiles.append(tile)
            image, target = part[row]
            assert torch.equal((image[0] * 255).round().to(torch.uint8), torch.cat(tiles, 1))
            assert target == part.targets[row]


def test_twins_differ_only_inside_the_occlusion(data):
    n, made = data
    for clean, corrupt in ((made.seen_clean, made.seen_corrupt), (made.novel_clean, made.novel_corrupt)):
        assert torch.equal(clean.targets, corrupt.targets)
        assert torch.equal(clean.rows, corrupt.rows)
        assert not clean.patches.any()
        changed = clean.pixels(range(len(clean))) != corrupt.pixels(range(len(clean)))
        tiles = changed.view(len(clean), 28, n, 28).transpose(1, 2)
        # No pixel of a digit is black, so each square shows in full: side times side pixels, in so many rows.
        side = corrupt.patches[..., 0]
        assert torch.equal(tiles.sum((2, 3)), side.square())
        for axis, start in ((3, 1), (2, 2)):
            hit = tiles.any(axis)
            assert torch.equal(hit.sum(2), side)
            first = hit.int().argmax(2)
            assert torch.equal(first[side > 0], corrupt.patches[..., start][side > 0])
        assert bool((corrupt.patches >= 0).all())
        assert bool((corrupt.patches[..., 1:] + side.unsqueeze(2) <= 28).all())


def test_share_side_and_place_of_occlusions():
    made = compose(train_size=20_000, seen_size=20_000)
    sides = made.train.patches[..., 0]
    # A side of 0, one time in 29, hides nothing.
    occluded = sides > 0
    chance = 0.2 * 28 / 29
    for position in range(2):
        assert binomtest(int(occluded[:, position].sum()), len(sides), chance).pvalue > 1e-4
    # Independent positions: both are hit as often as chance has it.
    assert binomtest(int(occluded.all(1).sum()), len(sides), chance**2).pvalue > 1e-4
    side, top, left = made.seen_corrupt.patches.flatten(0, 1).unbind(1)
    assert chisquare(side.bincount(minlength=29)).pvalue > 1e-4
    assert len(side.bincount()) == 29
    for length in (1, 14, 27):
        for corner in (top, left):
            counts = corner[side == length].bincount(minlength=29 - length)
            assert len(counts) == 29 - length
            assert chisquare(counts).pvalue > 1e-4
        assert len(torch.stack([top, left], 1)[side == length].unique(dim=0)) > 29 - length
    trained = made.train.patches[..., 0].flatten()
    counts = trained[trained > 0].bincount(minlength=29)[1:]
    assert chisquare(counts).pvalue > 1e-4
    assert int(counts.sum()) < binom.ppf(1 - 1e-6, 40_000, chance)


def test_digits_are_drawn_alike():
    made = compose(train_size=20_000)
    for digit in (0, 9):
        rows = made.train.rows[TRAIN.targets[made.train.rows] == digit]
        counts = rows.bincount(minlength=10 * PER_DIGIT)[TRAIN.targets == digit]
        assert chisquare(counts).pvalue > 1e-4


def test_a_seed_makes_one_data_set():
    def prints(made: NDigitData) -> list[str]:
        return [part.fingerprint() for part in parts(made).values()]

    first, again, other = compose(seed=3), compose(seed=3), compose(seed=4)
    assert prints(first) == prints(again)
    assert not set(prints(first)) & set(prints(other))
    assert not torch.equal(first.seen, other.seen)
    # The parts have streams of their own.
    larger = compose(seed=3, train_size=3000)
    assert prints(larger)[1:] == prints(first)[1:]
    assert not torch.equal(first.seen_clean.rows[:600], first.novel_clean.rows)
    assert not torch.equal(first.seen_corrupt.patches[:600], first.novel_corrupt.patches)


def test_it_is_a_split_like_others():
    part = compose().seen_corrupt
    rows = torch.tensor([5, 0, 7])
    taken = part.take(rows)
    assert torch.equal(taken.images([0, 1, 2]), part.images([5, 0, 7]))
    assert torch.equal(taken.targets, part.targets[rows])
    assert taken.fingerprint() != part.fingerprint()
    batches = list(loader(part, 512))
    assert [len(targets) for _, targets in batches] == [512, 512, 376]
    assert torch.equal(batches[0][0], part.images(range(512)))


def test_memory_does_not_grow_with_the_pixels():
    part = compose(3).train
    beside = sum(t.element_size() * t.numel() for t in (part.rows, part.patches, part.targets))
    assert beside / len(part) < 28 * 28 * 3 / 20
    assert part.digits.data_ptr() == TRAIN.pixels.data_ptr()


def test_it_reads_the_files_of_mnist(tmp_path):
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name, split in (("train", TRAIN), ("t10k", TEST)):
        images, labels = split.pixels.squeeze(1), split.targets.to(torch.uint8)
        for stem, values in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
            (folder / f"{name}-{stem}-ubyte.gz").write_bytes(gzip.compress(header + values.numpy().tobytes()))
    read, made = load_ndigit(tmp_path, 3, seed=5, **SIZES), compose(3, seed=5)
    for one, other in zip(parts(read).values(), parts(made).values(), strict=True):
        assert one.fingerprint() == other.fingerprint()


def few() -> TensorSplit:
    return TensorSplit(TRAIN.pixels[TRAIN.targets != 7], TRAIN.targets[TRAIN.targets != 7])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n": 1}, "n: expected 2 or 3 digits"),
        ({"n": True}, "n: expected 2 or 3 digits"),
        ({"n": 2.0}, "n: expected 2 or 3 digits"),
        ({"seed": -1}, "seed: expected a whole number"),
        ({"train_size": 139}, "train_size: expected a whole number, at least 140"),
        ({"seen_size": 0}, "seen_size: expected a whole number, at least 140"),
        ({"novel_size": 59}, "novel_size: expected a whole number, at least 60"),
        ({"novel_size": 60.0}, "novel_size: expected a whole number"),
        ({"n": 3, "train_size": 1399}, "train_size: expected a whole number, at least 1400"),
        ({"train": few()}, "train: expected images of the digits 0 to 9.*no image of 7"),
        ({"test": TensorSplit(TEST.pixels, TEST.targets + 1)}, "test: expected images of the digits"),
        ({"test": TensorSplit(TEST.pixels, TEST.targets.clamp(min=1) + (TEST.targets > 8))}, "test: expected images"),
        ({"test": TensorSplit(TEST.pixels[..., 1:], TEST.targets)}, "test: expected uint8 images"),
        ({"train": TensorSplit(TRAIN.pixels, TRAIN.targets, 16)}, "train: expected uint8 images .* white 255"),
    ],
)
def test_what_cannot_be_made_is_refused(change: dict[str, Any], says: str):
    with pytest.raises(InputError, match=says):
        compose_ndigit(**({"train": TRAIN, "test": TEST, "n": 2} | SIZES | change))


def test_images_in_files_are_refused():
    with pytest.raises(InputError, match="train: expected a TensorSplit, images in memory, got a FileSplit"):
        compose_ndigit(FileSplit([], torch.zeros(0), torch.as_tensor), TEST, 2, **SIZES)


def test_the_smallest_sizes_have_pairs_in_every_class():
    made = compose(train_size=140, seen_size=140, novel_size=60)
    for part in parts(made).values():
        assert set(part.targets.bincount().tolist()) == {0, 2}


@given(
    counts=st.lists(st.integers(1, 5), min_size=2, max_size=6),
    half=st.integers(1, 12),
    batches=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_half_of_the_pairs_match(counts, half, batches, seed):
    generator = torch.Generator().manual_seed(seed)
    targets = (3 * torch.arange(len(counts))).repeat_interleave(torch.tensor(counts))
    targets = targets[torch.randperm(len(targets), generator=generator)]
    if max(counts) == 1:
        with pytest.raises(InputError, match="two images of one class"):
            PairBatches(targets, 2 * half, batches, generator)
        return
    sampler = PairBatches(targets, 2 * half, batches, generator)
    drawn = list(sampler)
    assert len(drawn) == len(sampler) == batches
    for rows in drawn:
        first, second = torch.tensor(rows).view(-1, 2).unbind(1)
        assert len(first) == 2 * half
        assert bool((first != second).all())
        assert int((targets[first] == targets[second]).sum()) == half


def test_partners_are_drawn_alike():
    targets = torch.tensor([0, 1, 2, 1, 0, 1, 2, 3])
    sampler = PairBatches(targets, 20_000, 2, torch.Generator().manual_seed(0))
    once, twice = ([tuple(pair) for pair in torch.tensor(rows).view(-1, 2).tolist()] for rows in sampler)
    assert once != twice
    for matching in (True, False):
        chosen = torch.tensor([pair for pair in once if (targets[pair[0]] == targets[pair[1]]) == matching])
        for anchor in range(8):
            seconds = chosen[chosen[:, 0] == anchor, 1].bincount(minlength=8)
            allowed = (targets == targets[anchor]) == matching
            allowed[anchor] = False
            assert int(seconds[~allowed].sum()) == 0
            if allowed.any():
                assert chisquare(seconds[allowed]).pvalue > 1e-4 or int(allowed.sum()) == 1
        firsts = chosen[:, 0].bincount(minlength=8)
        assert chisquare(firsts[firsts > 0]).pvalue > 1e-4
        assert int((firsts > 0).sum()) == (7 if matching else 8)


def test_pairs_come_mixed_and_through_a_loader():
    made = compose().train
    sampler = PairBatches(made.targets, 64, 3, torch.Generator().manual_seed(1))
    batches = list(torch.utils.data.DataLoader(made, batch_sampler=sampler, collate_fn=lambda batch: batch))
    assert len(batches) == 3
    for images, targets in batches:
        assert images.shape == (128, 1, 28, 56)
        match = targets.view(-1, 2)[:, 0] == targets.view(-1, 2)[:, 1]
        assert int(match.sum()) == 32
        assert 0 < int(match[:32].sum()) < 32
    repeated = PairBatches(made.targets, 64, 3, torch.Generator().manual_seed(1))
    assert list(repeated) == list(PairBatches(made.targets, 64, 3, torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pairs": 3}, "pairs: expected an even number"),
        ({"pairs": 0}, "pairs: expected an even number"),
        ({"batches": 0}, "batches: expected a positive"),
        ({"targets": torch.zeros(4, 2)}, "targets: expected class labels"),
        ({"targets": torch.zeros(4, dtype=torch.long)}, "targets: expected at least two classes"),
        ({"targets": torch.arange(4)}, "targets: expected two images of one class"),
    ],
)
def test_pairs_that_cannot_be_drawn_are_refused(change: dict[str, Any], says: str):
    options: dict[str, Any] = {"targets": torch.tensor([0, 0, 1]), "pairs": 2, "batches": 1} | change
    with pytest.raises(InputError, match=says):
        PairBatches(**options, generator=torch.Generator())
