"""What the formulas of "Any loss of cosines" in docs/theory.md are made of, as the page has them."""

import torch
from tiny import numbers
from torch import Tensor

import contrastive_curvature as cc
from contrastive_curvature.losses.row_loss import RowLoss, RowTerms

__all__ = ["LABELS", "ROW_LOSSES", "D", "N", "Rows", "close", "numbers"]

N, D = 9, 4
LABELS = torch.arange(N) % 3
ROW_LOSSES: dict[str, RowLoss] = {
    "infonce": cc.InfoNCELoss(0.3),
    "supcon": cc.SupConLoss(0.3),
    "siglip": cc.SigLIPLoss(4.0, -1.0),
    "multisimilarity": cc.MultiSimilarityLoss(2.0, 10.0, 0.4),
    "triplet": cc.TripletLoss(0.5),
}


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> bool:
    """Whether no entry differs by more than a share of the largest."""
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


class Rows:
    """Everything that the page's formulas are made of, at N points of one tower."""

    def __init__(self, loss: RowLoss, device: str, seed: int = 0) -> None:
        self.loss, self.z, self.labels = loss, numbers(seed, N, D).to(device), LABELS.to(device)
        self.n = self.z.norm(dim=1)
        self.u = self.z / self.n.unsqueeze(1)
        self.cosine = self.u @ self.u.T
        self.positive = (self.labels[:, None] == self.labels).double().fill_diagonal_(0)
        self.negative = (self.labels[:, None] != self.labels).double()
        counts = loss._counts_at(self.cosine, self.positive, self.negative)
        self.factor = 1 / float(counts.sum())
        self.projector = torch.eye(D, dtype=torch.float64, device=device) - self.u[:, :, None] * self.u[:, None, :]
        self.terms = self.terms_at(self.cosine)

    def terms_at(self, cosine: Tensor) -> RowTerms:
        given = cosine, self.positive, self.negative
        return self.loss._terms(*given, self.loss._statistics(*given))

    def curvature_of_rows(self) -> Tensor:
        """``f C_i``, shape (N, M, M)."""
        assert self.terms.second is not None
        out = torch.diag_embed(self.terms.second)
        for sign, q in zip(self.loss.root_signs, self.terms.roots, strict=True):
            out = out + sign * q[:, :, None] * q[:, None, :]
        return self.factor * out

    def jacobian(self) -> Tensor:
        """``ds_ij / dz_k``, shape (N, M, N, D)."""
        out = self.z.new_zeros(N, N, N, D)
        # Row i, column j: P_i u_j / n_i.
        each = torch.einsum("iab,jb->ija", self.projector, self.u) / self.n.view(-1, 1, 1)
        for i in range(N):
            out[i, :, i] += each[i]
            out[:, i, i] += each[i]
        return out

    def second_part(self) -> Tensor:
        """``K = J_S^T C J_S``, shape (N D, N D)."""
        jacobian = self.jacobian().view(N, N, N * D)
        return torch.einsum("ija,ijk,ikb->ab", jacobian, self.curvature_of_rows(), jacobian)

    def first_part(self, distance: str) -> Tensor:
        """``F(Y)``, shape (N D, N D)."""
        g = self.factor * self.terms.first
        y = -(g + g.T)
        out = -torch.einsum("ij,iab,jbc->iajc", y / (self.n[:, None] * self.n), self.projector, self.projector)
        d, s = y.sum(1), y @ self.u
        a = (self.u * s).sum(1)
        t = s - a.unsqueeze(1) * self.u
        own = d.view(-1, 1, 1) * self.projector
        if distance == "arccos":
            mixed = self.u[:, :, None] * t[:, None, :]
            own = a.view(-1, 1, 1) * self.projector + mixed + mixed.mT
        index = torch.arange(N, device=self.z.device)
        out[index, :, index] = own / self.n.square().view(-1, 1, 1)
        return out.reshape(N * D, N * D)
