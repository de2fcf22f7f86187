"""Fits and embeddings of data that many machines share: in parts, on Ray or as a job array.

Importing this needs neither ray nor pyarrow; what needs one of them says so when it is used.
"""

from contrastive_curvature.io.jobs.embedding_folder import EmbeddingFolder
from contrastive_curvature.io.jobs.on_ray import embed_on_ray, fit_on_ray
from contrastive_curvature.io.jobs.parquet_parts import ParquetParts
from contrastive_curvature.io.jobs.state_folder import StateFolder

__all__ = ["EmbeddingFolder", "ParquetParts", "StateFolder", "embed_on_ray", "fit_on_ray"]
