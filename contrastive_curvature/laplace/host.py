"""What the mixins use of laplace-torch's classes: annotations only, so that the type checker knows the names."""

from __future__ import annotations

from typing import Any

__all__ = ["Host"]


class Host:
    """Attributes and methods that the host's half of a class brings; see laplace-torch for their meaning."""

    model: Any
    params: Any
    n_params: Any
    n_params_subnet: int
    n_layers: Any
    n_outputs: int
    n_data: int
    loss: Any
    mean: Any
    H: Any
    H_facs: Any
    damping: bool
    enable_backprop: bool
    dict_key_x: str
    dict_key_y: str
    likelihood: Any
    sample: Any
    backend: Any
    functional_variance: Any
    functional_covariance: Any
    _prior_precision: Any
    _prior_mean: Any
    _posterior_scale: Any
    _backend: Any
    _backend_cls: Any
    _backend_kwargs: Any
    _device: Any
    _dtype: Any
    _H_factor: Any
