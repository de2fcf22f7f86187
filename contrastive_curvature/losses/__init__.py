"""Losses of pairs of embeddings, and the pair weights that their Hessians are made of."""
