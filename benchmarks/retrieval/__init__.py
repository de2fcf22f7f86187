"""The retrieval experiments of Warburg et al. (2023): ``python -m benchmarks.retrieval --table {1,2,3,4}``.

The flow: config -> plan (rows, cells) -> run (fit or load, evaluate, one JSON a cell) -> report, plots.
"""
