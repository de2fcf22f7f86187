"""A fit in parts: what a part of the data adds, how parts merge, and what several processes tell each other."""

from contrastive_curvature.parts.exchange import ProcessGroup, present_exchange
from contrastive_curvature.parts.files import load_state, save_state
from contrastive_curvature.parts.rows import RowCollector, Rows
from contrastive_curvature.parts.share import Share
from contrastive_curvature.parts.state import CURVATURE, STATISTICS, Origin, State, merged

__all__ = [
    "CURVATURE",
    "STATISTICS",
    "Origin",
    "ProcessGroup",
    "RowCollector",
    "Rows",
    "Share",
    "State",
    "load_state",
    "merged",
    "present_exchange",
    "save_state",
]
