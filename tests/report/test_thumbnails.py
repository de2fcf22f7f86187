"""Pictures of inputs, of every form that people keep them in."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image
from tables import each

from contrastive_curvature.apps.report.thumbnails import SIDE, thumbnails
from contrastive_curvature.errors import InputError


def pixels(address):
    kind, content = address.split(",")
    assert kind in ("data:image/png;base64", "data:image/jpeg;base64")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))


GREY = np.arange(30, dtype=np.uint8).reshape(5, 6) * 8
COLOUR = np.stack([GREY, GREY[::-1], GREY // 2], axis=2)


@each(
    "item, wanted",
    [
        (GREY, GREY),
        (torch.from_numpy(GREY).unsqueeze(0), GREY),
        (GREY / 255, GREY),
        (torch.from_numpy(GREY / 255).half(), GREY),
        (GREY > 100, 255 * (GREY > 100)),
        (COLOUR, COLOUR),
        (np.moveaxis(COLOUR, 2, 0), COLOUR),
        (Image.fromarray(COLOUR), COLOUR),
        (Image.fromarray(GREY).convert("P"), None),
        (np.concatenate([COLOUR, COLOUR[:, :, :1] * 0 + 255], axis=2), COLOUR),
    ],
)
def test_small_images_keep_every_pixel(item, wanted):
    found = pixels(thumbnails([item])[0])
    assert found.shape[:2] == (5, 6)
    if wanted is not None:
        # Half precision has 11 bits, and a grey value 8.
        assert np.abs(found.astype(int) - wanted).max() <= (1 if getattr(item, "dtype", None) == torch.half else 0)


def test_image_files_are_shown_as_a_person_sees_them(tmp_path):
    """Turned by their EXIF orientation, white where they are transparent, and not clipped."""
    turned = Image.Exif()
    turned[0x112] = 6
    clear = np.dstack([COLOUR, np.where(GREY > 100, 255, 0).astype(np.uint8)])
    on_white = np.where(GREY[:, :, None] > 100, COLOUR, 255)
    palette = Image.fromarray(GREY).convert("P")
    for name, image, options, wanted in [
        ("turned.png", Image.fromarray(COLOUR), {"exif": turned}, np.rot90(COLOUR, -1)),
        ("turned.tif", Image.fromarray(COLOUR), {"exif": turned}, np.rot90(COLOUR, -1)),
        ("deep.png", Image.fromarray(GREY.astype(np.uint16) * 257), {}, GREY),
        ("deep.tif", Image.fromarray(GREY.astype(np.uint16) * 257), {}, GREY),
        ("whole.tif", Image.fromarray(GREY.astype(np.int32) * 257), {}, GREY),
        ("fractions.tif", Image.fromarray((GREY / 255).astype(np.float32)), {}, GREY),
        ("clear.png", Image.fromarray(clear), {}, on_white),
        ("palette.png", palette, {}, np.dstack([GREY] * 3)),
        ("hole.png", palette, {"transparency": 0}, np.dstack([np.where(GREY, GREY, 255)] * 3)),
    ]:
        image.save(tmp_path / name, **options)
        assert np.array_equal(pixels(thumbnails([tmp_path / name])[0]), wanted), name
    Image.fromarray(COLOUR).convert("CMYK").save(tmp_path / "print.jpg", quality=100)
    assert np.abs(pixels(thumbnails([tmp_path / "print.jpg"])[0]).astype(int) - COLOUR).max() <= 4


def test_normalised_images_have_one_scale():
    dark, bright = torch.full((1, 6, 6), -2.0), torch.full((1, 6, 6), 2.0)
    found = [pixels(address) for address in thumbnails([dark, bright, torch.zeros(1, 6, 6)])]
    assert [int(each[0, 0]) for each in found] == [0, 255, 128]
    assert pixels(thumbnails([torch.full((1, 6, 6), torch.nan)])[0]).max() == 0
    assert pixels(thumbnails([torch.full((1, 6, 6), torch.inf)])[0]).max() == 255


def test_large_images_become_small(tmp_path):
    Image.fromarray(np.zeros((600, 300, 3), np.uint8)).save(tmp_path / "large.png")
    addresses = thumbnails([tmp_path / "large.png", torch.rand(3, 500, 400)])
    assert pixels(addresses[0]).shape[:2] == (SIDE, SIDE // 2)
    assert max(pixels(addresses[1]).shape) == SIDE
    assert all(len(address) < 20_000 for address in addresses)


def test_bad_images_are_named(tmp_path):
    (tmp_path / "no.png").write_text("no image")
    assert thumbnails(["a text", None, 3]) == [None, None, None]
    for item in (torch.rand(5), tmp_path / "no.png"):
        with pytest.raises(InputError, match="items"):
            thumbnails([item])
