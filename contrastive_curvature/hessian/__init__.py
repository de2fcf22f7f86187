"""The core object: the Hessian of a loss with respect to the raw network outputs."""
