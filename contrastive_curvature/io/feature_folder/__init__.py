"""What the last layer of an encoder takes in, on disk, once: :func:`features` writes it and ``fit`` reads it."""

from contrastive_curvature.io.feature_folder.folder import FeatureFolder
from contrastive_curvature.io.feature_folder.write import features

__all__ = ["FeatureFolder", "features"]
