"""Is a match real? Probabilities that are calibrated on labelled pairs."""

from contrastive_curvature.matching.probability import MatchProbability, NearestMatch

__all__ = ["MatchProbability", "NearestMatch"]
