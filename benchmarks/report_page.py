"""The page of an evaluation, and its pictures in docs/report.md: digits, with an encoder that was trained on 0 to 7.

A small encoder (64-64-8) with the contrastive loss, 60 epochs, digits of scikit-learn: 600 to train, 300 to calibrate,
the others of 0 to 7 to test, searched in the training images; 8 and 9 are the unknown ones. The pictures need a
Chromium (chromium, chromium-browser or google-chrome), the page itself does not.

    python -m benchmarks.report_page [--out build/report] [--pictures docs/images]
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path
from typing import Any

import torch
from laplace import Laplace
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from contrastive_curvature.apps.report import Data, Evaluation, evaluate

_KNOWN_DIGITS = 8
_TRAIN, _CALIBRATE = 600, 300
_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
_SCREENS = {"report_wide.png": (1280, 1000, "light"), "report_phone.png": (375, 800, "dark")}
"""Width and height in pixels, and the colour scheme."""


def evaluate_digits(epochs: int = 60) -> Evaluation:
    """Train, fit, calibrate and evaluate."""
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    known = (y < _KNOWN_DIGITS).nonzero().flatten()
    known = known[torch.randperm(len(known))]
    train, calibrate, test = known.tensor_split([_TRAIN, _TRAIN + _CALIBRATE])

    encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=100, shuffle=True)
    contrastive_loss = cc.ContrastiveLoss(margin=0.7, normalization="type")
    optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            contrastive_loss(encoder(images), labels).backward()
            optimizer.step()

    la: Any = Laplace(encoder, likelihood="contrastive")
    la.fit(loader)
    la.optimize_prior_precision()
    la.calibrate([x[calibrate]])
    unknown = (y >= _KNOWN_DIGITS).nonzero().flatten()

    def data(rows: torch.Tensor) -> Data:
        names = [f"image {row}" for row in rows.tolist()]
        return Data([(x[rows], y[rows])], items=x[rows].view(-1, 8, 8).unbind(), ids=names)

    return evaluate(la, data(test), unknown=data(unknown), gallery=data(train))


def photograph(page: Path, folder: Path) -> list[Path]:
    """Pictures of the top of a page on a large and on a small screen."""
    from playwright.sync_api import sync_playwright

    browser_path = next(filter(None, map(shutil.which, _CHROMIUM)), None)
    if browser_path is None:
        raise SystemExit(f"expected a browser, one of {', '.join(_CHROMIUM)}, got none")
    files = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for name, (width, height, scheme) in _SCREENS.items():
            opened = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            opened.goto(page.resolve().as_uri())
            opened.wait_for_function("document.querySelector('[data-chart] svg')")
            if width < 500:
                opened.evaluate("document.getElementById('threshold').scrollIntoView({behavior: 'instant'})")
            picture = Image.open(io.BytesIO(opened.screenshot())).convert("RGB")
            # A palette: a third of the size, and no difference to the eye.
            picture.quantize(256, dither=Image.Dither.NONE).save(folder / name, optimize=True)
            files.append(folder / name)
        browser.close()
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/report"))
    parser.add_argument("--pictures", type=Path, help="folder for the pictures of the page; none without it")
    parser.add_argument("--epochs", type=int, default=60)
    options = parser.parse_args()
    found = evaluate_digits(options.epochs)
    for name, value in found.metrics.items():
        print(f"{name:<24} {value:.4f}")
    files = found.save(options.out, title="Digits 0 to 7: how sure is this encoder?")
    for path in [*files.values(), *(photograph(files["report.html"], options.pictures) if options.pictures else [])]:
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
