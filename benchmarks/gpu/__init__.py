"""All that is worth doing on a machine with a GPU, in one command: ``python -m benchmarks.gpu``, or ``make gpu``.

Tests and contract on the GPU, benchmarks with the fraction of the device's own rates that they reach, and the paper's
table 2. CONTRIBUTING.md says what is run and how to read it.
"""
