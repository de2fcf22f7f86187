"""The demonstration: train an encoder, fit the post-hoc Laplace, and see what its uncertainty knows.

``python -m contrastive_curvature.demo`` (``--help`` lists the options) prints a table and writes figures and plots into
a run folder. The flow: data -> train -> evaluate (posterior, predictions, scores) -> plots, report.
"""
