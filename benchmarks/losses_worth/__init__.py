"""What the curvature of the loss that an encoder was trained with is worth, beside that of another loss.

``python -m benchmarks.losses_worth --cache FOLDER`` fits the posterior of the last layer of each encoder of
``benchmarks.transfer`` with the curvature of several losses, and judges all of them by the same scores.
"""
