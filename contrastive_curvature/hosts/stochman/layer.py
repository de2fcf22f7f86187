"""What a layer of StochMan needs for curvature: products with its Jacobians, and the four sandwiches that follow.

StochMan's ``nnj`` writes every sandwich ``J^T M J`` by hand, four times a layer (from a full or a diagonal ``M``, to a
full or a diagonal result) and for few layers. Here a layer says how it pulls vectors back, or lets ``torch.func`` say
it, and the four follow once for all of them. Names and shapes are the host's: ``M`` acts on flattened outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from stochman.nnj import identity
from torch import Tensor, nn

from contrastive_curvature.network.threads import private_copy

__all__ = ["SandwichLayer", "SandwichVisitor", "Visitor"]

Visitor = Callable[["SandwichLayer", Tensor, Tensor], None]
"""Called with a layer that has parameters, its input (B, ...) and the cotangents (B, M, ...) at its output."""

SandwichVisitor = Callable[["SandwichLayer", Tensor, Tensor, Tensor, bool], None]
"""Called with a layer that has parameters, its input, its output, the matrix ``M`` at its output, and whether that is
given by its diagonal."""


class SandwichLayer(nn.Module):
    """A layer that treats every point of a batch alone, in evaluation mode.

    Subclasses put it before the host's (or torch's) layer: ``class Tanh(SandwichLayer, nnj.Tanh)``. Below, B is the
    batch, M a number of vectors, O and I the sizes of an output and an input, P the number of parameters.
    """

    def __call__(self, x: Tensor, jacobian: bool = False) -> Any:
        """Run the layer.

        Args:
            x: A batch (B, *input).
            jacobian: Whether to return the Jacobian too.

        Returns:
            The output (B, *output), or the pair of it and the Jacobian (B, *output, *input).
        """
        val = nn.Module.__call__(self, x)
        return (val, self._jacobian(x, val)) if jacobian else val

    def _jacobian(self, x: Tensor, val: Tensor) -> Tensor:
        return self._jacobian_wrt_input_mult_left_vec(x, val, identity(x))

    def _jacobian_wrt_input_mult_left_vec(self, x: Tensor, val: Tensor, jac_in: Tensor) -> Tensor:
        """``J jac_in``, with ``jac_in`` (B, *input, *rest) as the host carries it forward."""
        rest = jac_in.shape[x.ndim :]
        columns = jac_in.reshape(*x.shape, rest.numel()).movedim(-1, 1)
        return self._push(x, columns).movedim(1, -1).reshape(*val.shape, *rest)

    def _push(self, x: Tensor, tangents: Tensor) -> Tensor:
        """``J t`` for tangents (B, M, *input); shape (B, M, *output)."""

        def one(t: Tensor) -> Tensor:
            return torch.func.jvp(self.forward, (x,), (t,))[1]

        return torch.func.vmap(one, in_dims=1, out_dims=1)(tangents)

    def _pull_input(self, x: Tensor, cotangents: Tensor) -> Tensor:
        """``J^T v`` for cotangents (B, M, *output); shape (B, M, *input)."""
        pull = torch.func.vjp(self.forward, x)[1]
        return torch.func.vmap(lambda v: pull(v)[0], in_dims=1, out_dims=1)(cotangents)

    def _pull_weight(self, x: Tensor, cotangents: Tensor) -> Tensor:
        """``J_w^T v`` for cotangents (B, M, *output) and the parameters in their order; shape (B, M, P)."""
        params = {name: p.detach() for name, p in self.named_parameters()}
        # The values below are not for other threads that use this layer.
        layer = private_copy(self)

        def one(point: Tensor, v: Tensor) -> Tensor:
            def outputs(values: dict[str, Tensor]) -> Tensor:
                return torch.func.functional_call(layer, values, (point.unsqueeze(0),))

            pull = torch.func.vjp(outputs, params)[1]
            (found,) = torch.func.vmap(lambda w: pull(w.unsqueeze(0)))(v)
            return torch.cat([found[name].flatten(1) for name in params], dim=1)

        return torch.func.vmap(one)(x, cotangents)

    def _walk(self, x: Tensor, cotangents: Tensor, visit: Visitor, to_input: bool = True) -> Tensor:
        """Pull cotangents back, showing them to a visitor wherever there are parameters.

        Args:
            x: Input of this layer.
            cotangents: At its output, (B, M, *output).
            visit: See :data:`Visitor`.
            to_input: Whether the cotangents at the input are wanted.

        Returns:
            The cotangents at the input (B, M, *input); empty when they are not wanted.
        """
        if next(self.parameters(), None) is not None:
            visit(self, x, cotangents)
        return self._pull_input(x, cotangents) if to_input else cotangents.new_empty(0)

    def _sweep(
        self, x: Tensor, val: Tensor, tmp: Tensor, diag_inp: bool, diag_out: bool, visit: SandwichVisitor
    ) -> None:
        """Show a matrix at the output to a visitor wherever there are parameters, without going on to the input."""
        if next(self.parameters(), None) is not None:
            visit(self, x, val, tmp, diag_inp)

    def _jacobian_wrt_input_sandwich(
        self, x: Tensor, val: Tensor, tmp: Tensor, diag_inp: bool = False, diag_out: bool = False
    ) -> Tensor:
        """``J^T M J`` of the input's Jacobian.

        Args:
            x: Input (B, *input).
            val: Output (B, *output).
            tmp: ``M``: (B, O, O), or its diagonal (B, O).
            diag_inp: Whether ``tmp`` is a diagonal.
            diag_out: Whether only the diagonal of the result is wanted.

        Returns:
            Shape (B, I, I), or (B, I).
        """

        def pull(v: Tensor) -> Tensor:
            return self._pull_input(x, v.reshape(*v.shape[:2], *val.shape[1:])).flatten(2)

        return _sandwich(pull, tmp, diag_inp, diag_out)

    def _jacobian_wrt_weight_sandwich(
        self, x: Tensor, val: Tensor, tmp: Tensor, diag_inp: bool = False, diag_out: bool = False
    ) -> Tensor | None:
        """The same for the Jacobian of the parameters: (B, P, P), or (B, P); ``None`` for a layer without any."""
        if next(self.parameters(), None) is None:
            return None

        def pull(v: Tensor) -> Tensor:
            return self._pull_weight(x, v.reshape(*v.shape[:2], *val.shape[1:]))

        return _sandwich(pull, tmp, diag_inp, diag_out)

    def _weight_diagonal(self, x: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Diagonal of ``sum_i J_w^T (sum_m left_im right_im^T) J_w`` for cotangents (B, M, *output); shape (P,)."""
        return torch.einsum("bmp,bmp->p", self._pull_weight(x, left), self._pull_weight(x, right))

    def _cross_diagonal(self, rows: tuple[Tensor, Tensor], columns: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        """Diagonal of ``sum_ij y_ij sum_m (J_w^T v_im) (J_w^T v_jm)^T``; shape (P,).

        Args:
            rows: Input and cotangents (R, M, *output) of R points.
            columns: The same of C points.
            y: Shape (R, C).
        """
        right = self._pull_weight(*columns)
        left = right if rows[1] is columns[1] else self._pull_weight(*rows)
        return torch.einsum("rmp,rmp->p", left, torch.einsum("rc,cmp->rmp", y, right))


def _sandwich(pull: Callable[[Tensor], Tensor], tmp: Tensor, diag_inp: bool, diag_out: bool) -> Tensor:
    """All four sandwiches from the rows that a pull gives."""
    if diag_inp or diag_out:
        size = tmp.shape[1]
        jacobian = pull(torch.eye(size, dtype=tmp.dtype, device=tmp.device).expand(len(tmp), size, size))
        curved = tmp.unsqueeze(2) * jacobian if diag_inp else tmp @ jacobian
        return torch.einsum("boi,boi->bi", jacobian, curved) if diag_out else jacobian.mT @ curved
    # The rows of M are pulled back, then those of (M J)^T: M may be far from a product of few vectors.
    return pull(pull(tmp).mT).mT
