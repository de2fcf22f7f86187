"""What the library is claimed to cost, measured: run a module, for example ``python -m benchmarks.curvature``."""
