"""Numbers, random vectors, and quadrature on the circle and the sphere, for the tests of von Mises-Fisher."""

import math

import numpy as np
import torch
from torch import Tensor


def f64(value: object, device: str = "cpu") -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device=device)


def random(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device)


def sphere(dim: int, n: int = 128) -> tuple[Tensor, Tensor]:
    """Points of the circle (D = 2) or the sphere (D = 3), and their quadrature weights."""
    angle = torch.arange(4 * n, dtype=torch.float64) * (2 * math.pi / (4 * n))
    circle = torch.stack([angle.cos(), angle.sin()], 1)
    if dim == 2:
        return circle, torch.full((4 * n,), 2 * math.pi / (4 * n), dtype=torch.float64)
    height, weight = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(n))
    radius = (1 - height.square()).sqrt()
    flat = radius[:, None, None] * circle
    points = torch.cat([flat, height[:, None, None].expand(-1, 4 * n, 1)], -1)
    return points.reshape(-1, 3), (weight[:, None].expand(-1, 4 * n) * (2 * math.pi / (4 * n))).reshape(-1)
