"""The distribution of an embedding: its spread, uncertainty, p-value, similarity to others and what a gallery adds."""
