"""Images of a folder: which there are, and how one becomes a tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from contrastive_curvature.apps.cli.encoders import their_error
from contrastive_curvature.apps.cli.errors import BadInputError, missing
from contrastive_curvature.errors import expected

__all__ = ["find_images", "read_image"]

_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


def find_images(folder: Path) -> list[Path]:
    """Images in a folder and in those inside it, sorted; symbolic links are followed, hidden names left out.

    Raises:
        BadInputError: There are none, or a symbolic link leads nowhere.
        OSError: A folder cannot be read.
    """
    found = sorted(_images(folder, frozenset()))
    if not found:
        hint = "A feature folder has a header.json."
        raise BadInputError(expected(f"{folder}", f"images ({', '.join(_ENDINGS)}) or saved features", "none", hint))
    return found


def _images(folder: Path, above: frozenset[str]) -> Iterator[Path]:
    real = os.path.realpath(folder)
    # A link to a folder above it would never end. A folder that two links lead to counts twice, as in torchvision.
    if real in above:
        return
    for name in os.listdir(folder):
        path = folder / name
        if name.startswith("."):
            continue
        if os.path.isdir(path):
            yield from _images(path, above | {real})
        elif os.path.isfile(path):
            if path.suffix.lower() in _ENDINGS:
                yield path
        elif not os.path.exists(path):
            hint = "Remove the link, or bring back what it leads to."
            raise BadInputError(expected(f"{path}", "a link to a file or a folder", "one that leads nowhere", hint))


def read_image(file: Path, transform: Callable[[Any], Any], name: str) -> Tensor:
    """An image as the encoder takes it.

    Args:
        file: The image.
        transform: Of the encoder: ``PIL.Image`` (RGB) -> tensor.
        name: Of the encoder, for messages.

    Raises:
        BadInputError: It is no image, Pillow is missing, or the transform fails or returns something else.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise BadInputError(missing(f"{file}", "Pillow", "pip install pillow")) from error
    try:
        with Image.open(file) as opened:
            image = opened.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # PIL raises many kinds for damaged files
        reason = str(error) or type(error).__name__
        raise BadInputError(expected(f"{file}", "an image", f"what cannot be read ({reason})")) from error
    argument = f"the transform of {name}"
    try:
        made = transform(image)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's own transform raises
        raise their_error(argument, f"a tensor for {file}", error) from error
    if not isinstance(made, Tensor):
        wanted = f"a torch.Tensor for {file}"
        raise BadInputError(expected(argument, wanted, f"a {type(made).__name__}"))
    return made
