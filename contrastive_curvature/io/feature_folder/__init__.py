"""The inputs of an encoder's last layer on disk: :func:`features` writes them and ``fit`` reads them."""

from contrastive_curvature.io.feature_folder.folder import FeatureFolder
from contrastive_curvature.io.feature_folder.write import features

__all__ = ["FeatureFolder", "features"]
