"""The posterior of an encoder as a value, and what follows from it; nothing here knows laplace-torch."""
