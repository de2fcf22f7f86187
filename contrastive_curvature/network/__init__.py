"""Encoders, and the pullback of a Hessian at their outputs to their parameters."""
