"""Curvature of contrastive losses, for encoders that know how certain an embedding is.

labels -> pairs -> output Hessian -> parameter curvature -> Laplace posterior -> embedding distribution

Importing the package registers ``likelihood="contrastive"`` with laplace-torch, and the loss and the normalisation with
BackPACK's extensions; :func:`unregister` undoes both. The names in ``__init__.pyi`` are imported at first use.
"""

import lazy_loader

from contrastive_curvature.registration import register
from contrastive_curvature.removed import refuse_removed

__version__ = "0.2.0"

_find, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = refuse_removed(__name__, _find)

register()
