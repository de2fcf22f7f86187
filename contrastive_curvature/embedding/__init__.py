"""The distribution of an embedding: its spread, uncertainty, p-value and similarity to other embeddings."""
