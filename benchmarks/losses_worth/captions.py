"""Captions of Fashion-MNIST's images, made of their labels, and two small towers that are trained on them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.experiments.networks import make_network
from benchmarks.transfer.recipes.image_encoder import Images, make_inputs
from benchmarks.transfer.train import seeded

__all__ = ["NAMES", "TEMPERATURE", "caption_ids", "draw_captions", "make_towers", "prompts", "train_towers"]

NAMES = (
    ("t-shirt", "top"),
    ("trousers", "pair of trousers"),
    ("pullover", "knitted pullover"),
    ("dress", "long dress"),
    ("coat", "warm coat"),
    ("sandal", "summer sandal"),
    ("shirt", "buttoned shirt"),
    ("sneaker", "running sneaker"),
    ("bag", "hand bag"),
    ("ankle boot", "boot"),
)
"""Two names of each class, in the order of the labels."""

TEMPLATES = (
    "a photo of a {}",
    "a small picture of one {}",
    "{} on a black ground",
    "buy this {} now",
    "the {} seen from the side",
    "grey {} for sale",
)
TEMPERATURE = 0.07

_WORDS = sorted({word for text in (*TEMPLATES, *(name for names in NAMES for name in names)) for word in text.split()})
_IDS = {word: number for number, word in enumerate(_WORDS, 1)}
_LENGTH = 10
_WIDTH = 64


def caption_ids(text: str) -> list[int]:
    """Numbers of the words, filled up with zeros."""
    ids = [_IDS[word] for word in text.split()]
    return ids + [0] * (_LENGTH - len(ids))


def _all_captions() -> Tensor:
    """Shape (classes, templates x names, length)."""
    texts = [[t.format(name) for t in TEMPLATES for name in names] for names in NAMES]
    return torch.tensor([[caption_ids(text) for text in some] for some in texts])


def prompts() -> tuple[Tensor, Tensor]:
    """Word numbers (P, length) and classes (P,) of all templates with the first name of each class."""
    texts = [(t.format(names[0]), label) for label, names in enumerate(NAMES) for t in TEMPLATES]
    return torch.tensor([caption_ids(text) for text, _ in texts]), torch.tensor([label for _, label in texts])


def draw_captions(labels: Tensor, generator: torch.Generator) -> Tensor:
    """One random caption of each label (B,), shape (B, length)."""
    found = _all_captions()
    return found[labels, torch.randint(found.shape[1], (len(labels),), generator=generator)]


def make_towers(dim: int, seed: int) -> tuple[nn.Module, nn.Module]:
    """Untrained towers of images (B, 1, 28, 28) and of word numbers (B, length), both to (B, dim)."""
    with seeded(seed):
        images = make_network("fashionmnist", dim).to(memory_format=torch.channels_last)
        bag = nn.EmbeddingBag(len(_IDS) + 1, _WIDTH, mode="mean", padding_idx=0)
        return images, nn.Sequential(bag, nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, dim))


def train_towers(
    towers: tuple[nn.Module, nn.Module], images: Images, labels: Tensor, epochs: int, seed: int, batch: int = 128
) -> list[float]:
    """Train both in place with the symmetric InfoNCE loss, and leave them in evaluation mode.

    Args:
        towers: Of :func:`make_towers`.
        images: Shape (N, H, W, C).
        labels: Shape (N,); seen through random captions only.
        epochs: Passes over the images.
        seed: Of the order and the captions.
        batch: Pairs of a step.

    Returns:
        The mean loss of each epoch.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = [parameter for tower in towers for parameter in tower.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=1e-4)
    steps = len(labels) // batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps * epochs + 1)
    history = []
    for _ in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(labels), generator=generator).split(batch)[:steps]:
            with torch.autocast("cpu", torch.bfloat16):
                outputs = towers[0](make_inputs(images[rows.numpy()]))
            u = F.normalize(outputs.float())
            v = F.normalize(towers[1](draw_captions(labels[rows], generator)))
            logits, own = u @ v.T / TEMPERATURE, torch.arange(len(rows))
            loss = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach())
        history.append(total / steps)
    for tower in towers:
        tower.eval()
    return history
