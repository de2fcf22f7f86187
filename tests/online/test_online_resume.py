"""A training that goes on from what torch.save kept ends with the same bits as one that was not interrupted."""

from pathlib import Path

import torch
from tables import each
from torch import Tensor, nn

from contrastive_curvature.online import OnlineLaplace

HOW = [("last_layer", structure) for structure in ("diag", "full", "kron", "kron_lowrank")] + [("all", "diag")]


@each("how", HOW)
def test_a_state_goes_on_with_the_same_bits(how: tuple[str, str], device: str, tmp_path: Path) -> None:
    x, labels = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)).to(device), torch.arange(24) % 4

    def make() -> tuple[OnlineLaplace, torch.optim.Optimizer]:
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 3))
        options = {"subset_of_weights": how[0], "hessian_structure": how[1], "n_samples": 2, "memory_factor": 0.1}
        online = OnlineLaplace(encoder.to(device), probe=x[:4], n_data=24, **options)
        return online, torch.optim.Adam(online.parameters(), lr=1e-2)

    def train(online: OnlineLaplace, optimizer: torch.optim.Optimizer) -> None:
        for rows in torch.arange(24, device=device).split(6):
            optimizer.zero_grad()
            online(x[rows], labels.to(device)[rows]).backward()
            optimizer.step()

    whole, optimizer = make()
    train(whole, optimizer)
    parts = {"online": whole.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
    torch.save(parts, tmp_path / "training.pt")
    gpu = torch.cuda.get_rng_state() if device == "cuda" else None
    train(whole, optimizer)

    again, optimizer = make()
    saved = torch.load(tmp_path / "training.pt", weights_only=True, map_location="cpu")
    again.load_state_dict(saved["online"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"])
    if gpu is not None:
        torch.cuda.set_rng_state(gpu)
    train(again, optimizer)
    for name, value in whole.state_dict().items():
        assert not isinstance(value, Tensor) or torch.equal(value, again.state_dict()[name]), name
