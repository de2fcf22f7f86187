"""BackPACK: pair losses in its own extensions, extensions for indefinite and coupled Hessians, and a pullback.

What holds for an extended model, beside what BackPACK's documentation says:

- The scale of the loss: :class:`DiagCurvature` and :class:`CurvatureFactor` give the curvature of what ``backward()``
  is called on: ``(5 * loss).backward()`` has five times that of ``loss``, and several losses may be summed. BackPACK's
  own extensions ignore a factor, for every loss: theirs is the curvature of ``loss``.
- Every operation must be a module: a function inside ``forward`` (``torch.tanh``, ``2 * h`` in a branch) leaves no
  trace in BackPACK, for every loss, and its factor is missing in the curvature. :class:`BackPackPullback` needs no
  extended model, and refuses such functions.
- Contexts do not add up: inside ``with backpack(A):`` a ``with backpack(B):`` runs B alone. Give one context both.
- Dropout and batch normalisation must be in evaluation mode. Our extensions refuse them in training mode; do not rely
  on BackPACK's to do so.
"""

from contrastive_curvature.hosts.backpack.extensions import CurvatureFactor, DiagCurvature
from contrastive_curvature.hosts.backpack.pullback import BackPackPullback

__all__ = [
    "BackPackPullback",
    "CurvatureFactor",
    "DiagCurvature",
]
