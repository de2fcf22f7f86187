"""Encoders, and how a Hessian at their outputs is pulled back to their parameters."""
