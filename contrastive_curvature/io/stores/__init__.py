"""A corpus of embeddings with their uncertainties in a vector store: FAISS in memory, LanceDB on disk."""

from contrastive_curvature.io.stores.embeddings import StoredEmbeddings
from contrastive_curvature.io.stores.faiss_store import FaissStore
from contrastive_curvature.io.stores.lance_store import LanceStore
from contrastive_curvature.io.stores.result import SearchResult
from contrastive_curvature.io.stores.store import VectorStore

__all__ = ["FaissStore", "LanceStore", "SearchResult", "StoredEmbeddings", "VectorStore"]
