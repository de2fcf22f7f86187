"""OpenOOD's unknown kinds of CIFAR-10, as far as they can be had, by a published ResNet-56 with a trained head.

Known: 9,000 of the 10,000 test images, and 1,000 for calibration. Near: Tiny ImageNet, without classes that are or
contain one of CIFAR-10; far: MNIST and Textures. Source: Zhang et al., "OpenOOD v1.5", 2023 (arXiv 2306.09301). All
images are JPEG of the same quality, for CIFAR-10 can be had as such alone, and its code must not tell the kinds apart.

    python -m benchmarks.openood --data-root FOLDER --cache FOLDER

The data root has CIFAR-10-images, pytorch_resnet_cifar10 and MNIST, as for ``benchmarks.transfer``, and
``tiny-imagenet/val`` (images of 32 x 32 pixels and ``val_annotations.txt``) and ``dtd/images/CLASS/*.jpg``.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, JpegImagePlugin

from benchmarks.machine import Case, describe, machine_line, options, table, write_results
from benchmarks.transfer.feature_file import FeatureFile, load_features
from benchmarks.transfer.fitted import Fitted
from benchmarks.transfer.recipes import cifar10
from benchmarks.transfer.recipes.image_encoder import Images, features_of, unknown_images
from benchmarks.transfer.rows import all_rows
from contrastive_curvature import metrics

ENCODER = "cifar10-resnet56-128-supcon"
"""Its head was trained by this recipe of ``benchmarks.transfer``."""

OVERLAP = """
n02124075 n02123045 n02123394 n02106662 n02099712 n02099601 n02094433 n02085620 n02113799 n01641577 n01644900
n04285008 n03100240 n02814533 n03670208 n03977966 n03796401 n02058221 n02056570 n01855672 n02002724 n03662601
""".split()  # noqa: SIM905
"""Classes of Tiny ImageNet that are or contain a class of CIFAR-10, chosen by hand."""

PUBLISHED = {"KNN": (90.64, 92.96), "RMDS": (89.80, 92.20), "ViM": (88.68, 93.48), "MDS": (84.20, 89.72)}
"""Near and far, OpenOOD's ResNet-18 on lossless images: other encoders, other unknown images."""

SIDE, KNOWN, CALIBRATION, UNKNOWN = 32, 10_000, 1_000, 4_000


def unknown_kinds(root: Path) -> dict[str, Images]:
    """Images of each kind, (N, 32, 32, 3)."""
    place = root / "tiny-imagenet" / "val"
    named = [line.split("\t")[:2] for line in (place / "val_annotations.txt").read_text().splitlines()]
    names = [name for name, label in named if label not in OVERLAP]
    chosen = np.random.default_rng(0).permutation(len(names))[:UNKNOWN]
    like = Image.open(min((root / "CIFAR-10-images" / "test" / "cat").glob("*.jpg")))
    return {
        "near-tinyimagenet": np.stack([small(place / "images" / names[row]) for row in chosen]),
        "far-mnist": recompressed(unknown_images("mnist", root, (3, SIDE, SIDE), UNKNOWN, 0), like),
        "far-textures": recompressed(
            np.stack([small(path) for path in sorted((root / "dtd" / "images").glob("*/*.jpg"))]), like
        ),
    }


def small(path: Path) -> NDArray[np.uint8]:
    """Shorter side to 32 pixels, then the centre, as OpenOOD does."""
    with Image.open(path) as image:
        found = image.convert("RGB")
    scale = SIDE / min(found.size)
    width, height = (max(SIDE, round(size * scale)) for size in found.size)
    if found.size != (width, height):
        found = found.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - SIDE) // 2, (height - SIDE) // 2
    return np.asarray(found.crop((left, top, left + SIDE, top + SIDE)))


def recompressed(images: Images, like: Image.Image) -> Images:
    """The same images as JPEG with the tables of another file."""
    assert isinstance(like, JpegImagePlugin.JpegImageFile)
    found, sampling = [], JpegImagePlugin.get_sampling(like)
    for image in images:
        file = BytesIO()
        Image.fromarray(image).save(file, "JPEG", qtables=like.quantization, subsampling=sampling)
        found.append(np.asarray(Image.open(file).convert("RGB")))
    return np.stack(found)


def feature_file(root: Path, head: FeatureFile) -> tuple[FeatureFile, float]:
    """Features of all kinds by the trunk, and the share of known images that its own classifier has right."""
    trunk = cifar10.published_trunk(root)
    test, labels = cifar10.read_images(root / "CIFAR-10-images" / "test", KNOWN, 1)
    features, rest, known = features_of(trunk, test), labels[CALIBRATION:], slice(CALIBRATION, None)
    content = replace(
        head,
        test_features=features[known],
        test_labels=rest,
        calibration_features=features[:CALIBRATION],
        calibration_labels=labels[:CALIBRATION],
        unknown={kind: features_of(trunk, images) for kind, images in unknown_kinds(root).items()},
        corrupted={},
        corrupted_rows=None,
    )
    with torch.no_grad():
        top = trunk.linear(torch.from_numpy(features[known])).argmax(1).numpy()
    return content, float((top == rest).mean())


def judge(content: FeatureFile) -> dict[str, dict[str, float]]:
    """AUROC in percent of every score, by kind."""
    fitted = Fitted(content)
    points = {kind: fitted.points(features) for kind, features in content.unknown.items()}
    found = {}
    for row in all_rows():
        known = row.score(fitted, fitted.test)
        found[row.title] = {
            kind: 100 * float(metrics.auroc(known, row.score(fitted, some))) for kind, some in points.items()
        }
    return found


def render(results: Case) -> str:
    """One line a score, then the published ones."""
    kinds = list(results["sizes"])

    def cells(of: dict[str, float]) -> list[str]:
        means = [statistics.mean(of[kind] for kind in kinds if kind.startswith(part)) for part in ("near", "far")]
        return [f"{value:.1f}" for value in (*(of[kind] for kind in kinds), *means)]

    rows = [[title, *cells(of)] for title, of in results["auroc"].items()]
    sizes = ", ".join(f"{kind} {count:,}" for kind, count in results["sizes"].items())
    published = [[name, *(f"{value:.2f}" for value in pair)] for name, pair in PUBLISHED.items()]
    parts = [
        "# OpenOOD's kinds of unknown images for CIFAR-10",
        f"`python -m benchmarks.openood`, {machine_line(results['machine'])}. AUROC in percent on `{ENCODER}`, whose "
        f"trunk's own classifier has {results['accuracy']:.1%} of the known images right. "
        f"Images: {sizes}. All are JPEG. Not to be had: CIFAR-100, SVHN, Places365, some of Textures.",
        table(["score", *kinds, "mean near", "mean far"], rows),
        "Published for OpenOOD's ResNet-18, with all kinds, on lossless images:",
        table(["score", "near", "far"], published),
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="folder of the images")
    parser.add_argument("--cache", type=Path, default=Path("runs/transfer"), help="folder with the feature file")
    given = parser.parse_args(arguments)
    content, accuracy = feature_file(given.data_root, load_features(given.cache / f"{ENCODER}.npz"))
    sizes = {kind: len(features) for kind, features in content.unknown.items()}
    results = {"machine": describe(), "accuracy": accuracy, "sizes": sizes, "auroc": judge(content)}
    write_results(given.out, "openood", results, render(results))


if __name__ == "__main__":
    main()
