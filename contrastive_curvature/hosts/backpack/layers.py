"""The layers that BackPACK can differentiate, and the settings for which its derivatives are right."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, NoReturn

import torch
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.embedding import EmbeddingDerivatives
from backpack.extensions import SqrtGGNExact
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.pooling import _MaxPoolNd

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.sphere import L2Norm
from contrastive_curvature.hosts.backpack.module_derivatives import L2NormDerivatives

ADVICE = "Use backend=ContrastiveGGN, which works for any module."

_AVERAGES = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_ADAPTIVE_AVERAGES = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)


class Layer(NamedTuple):
    """Derivatives of a module class, BackPACK's or ours in the same form, and the names of its parameters."""

    derivatives: Any
    params: tuple[str, ...] = ()


class _LinearMap(BaseDerivatives):
    """A layer without parameters that is linear in each point: its transpose, by autograd.

    BackPACK's rules for average pooling work only in the default precision and for sizes without remainder.
    """

    def hessian_is_zero(self, module: nn.Module) -> bool:
        return True

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Any, g_out: Any, mat: Tensor, subsampling: list[int] | None = None
    ) -> Tensor:
        many, points = mat.shape[:2]
        with torch.enable_grad():
            x = module.input0.new_zeros(many * points, *module.input0.shape[1:], requires_grad=True)
            # Not module(x), because the hooks of an extended module would record this as its forward pass.
            (moved,) = torch.autograd.grad(module.forward(x), x, mat.flatten(0, 1))
        return moved.view(many, points, *module.input0.shape[1:])


class _Lookup(EmbeddingDerivatives):
    """BackPACK's embedding rule, in every precision and with a padding index."""

    def _weight_jac_t_mat_prod(
        self,
        module: Any,
        g_inp: Any,
        g_out: Any,
        mat: Tensor,
        sum_batch: bool = True,
        subsampling: list[int] | None = None,
    ) -> Tensor:
        x = module.input0 if subsampling is None else module.input0[subsampling]
        rows = nn.functional.one_hot(x, module.num_embeddings).to(mat.dtype)
        if module.padding_idx is not None:
            rows[..., module.padding_idx] = 0
        return torch.einsum(f"n...s,vn...h->v{'' if sum_batch else 'n'}sh", rows, mat)


@functools.cache
def known_layers() -> dict[type[nn.Module], Layer]:
    """Return every supported module class: those of the host's ``SqrtGGNExact``, normalisation, and reshaping."""
    host = SqrtGGNExact()._BackpropExtension__module_extensions
    known = {
        kind: Layer(ext.derivatives, tuple(ext._ModuleExtension__params))
        for kind, ext in host.items()
        if not issubclass(kind, nn.modules.loss._Loss)
    }
    linear = Layer(_LinearMap())
    known.update(dict.fromkeys((*_AVERAGES, *_ADAPTIVE_AVERAGES, nn.Flatten, nn.Unflatten, nn.ZeroPad2d), linear))
    known[nn.Embedding] = Layer(_Lookup(), ("weight",))
    known[L2Norm] = Layer(L2NormDerivatives())
    return known


def check_layer(name: str, module: nn.Module) -> None:
    """Refuse a layer that BackPACK cannot differentiate with these settings; the message names it."""
    layer = known_layers().get(type(module))
    if layer is None:
        refuse(name, module, "BackPACK has no derivatives of it")
    if "forward" in vars(module):
        refuse(name, module, "its forward was replaced")
    if not {n for n, _ in module.named_parameters()} <= set(layer.params):
        refuse(name, module, "its parameters are not the usual ones (weight or spectral norm?)")
    why = _wrong_setting(module)
    if why:
        refuse(name, module, why)


def refuse(name: str, module: nn.Module, why: str) -> NoReturn:
    """Raise an error that names a layer, says why it is refused, and names another backend."""
    raise UnsupportedError(f"backend BackPACK: layer {name!r}, a {type(module).__name__}: {why}. {ADVICE}")


def _wrong_setting(m: Any) -> str:
    """Return the setting of a known layer for which BackPACK has no right derivatives; empty if there is none."""
    if isinstance(m, _BatchNorm) and not (m.affine and m.track_running_stats):
        return "only affine=True and track_running_stats=True have derivatives"
    if isinstance(m, _ConvNd) and m.padding_mode != "zeros":
        return f"padding_mode={m.padding_mode!r} has no derivatives"
    if isinstance(m, _ConvNd) and any(m.output_padding):
        return f"output_padding={m.output_padding!r} has no derivatives"
    if isinstance(m, _ConvNd) and isinstance(m.padding, str):
        return "BackPACK takes numbers as padding only"
    if isinstance(m, _MaxPoolNd) and m.return_indices:
        return "return_indices=True gives two outputs"
    if isinstance(m, nn.Embedding) and (m.max_norm is not None or m.scale_grad_by_freq or m.sparse):
        return "max_norm, scale_grad_by_freq and sparse are not supported"
    if isinstance(m, (nn.Flatten, nn.Unflatten)) and (m.start_dim if isinstance(m, nn.Flatten) else m.dim) == 0:
        return "it reshapes the batch axis"
    return ""
