"""The experiments: the retrieval tables of Warburg et al. (2023), and the demonstration.

``python -m benchmarks.experiments --table {1,2,3,4,demo}`` (``--help`` lists the options). The flow: config -> plan
(rows, cells) -> run (fit or load, evaluate, one JSON a cell) -> report, plots. Data sets, methods and networks are in
folders of their own.
"""
