"""BackPACK: pair losses in its own extensions, extensions for indefinite and coupled Hessians, and a pullback.

Rules for an extended model, in addition to BackPACK's documentation:

- The scale of the loss: :class:`DiagCurvature` and :class:`CurvatureFactor` give the curvature of the number that
  ``backward()`` is called on: ``(5 * loss).backward()`` gives five times the curvature of ``loss``, and several losses
  may be summed. ``HMP`` and ``DiagHessian`` of our losses include a factor, too. BackPACK's other extensions ignore it,
  for every loss, and warn: they give the curvature of ``loss``.
- Every operation must be a module: BackPACK does not see a function inside ``forward`` (``torch.tanh``, ``2 * h`` in a
  branch), for any loss, so its factor is missing in the curvature. :class:`BackPackPullback` needs no extended model,
  and refuses such functions.
- Contexts do not add up: inside ``with backpack(A):`` a ``with backpack(B):`` runs only B. Pass both to one context.
- Dropout and batch normalisation must be in evaluation mode. Our extensions refuse them in training mode; BackPACK's
  extensions may not.
"""

from contrastive_curvature.hosts.backpack.extensions import CurvatureFactor, DiagCurvature
from contrastive_curvature.hosts.backpack.host_pullback import BackPackPullback

__all__ = [
    "BackPackPullback",
    "CurvatureFactor",
    "DiagCurvature",
]
