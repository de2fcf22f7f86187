"""``python -m contrastive_curvature``: the same as the command ``contrastive-curvature``."""

from __future__ import annotations

from contrastive_curvature.apps.cli import main

if __name__ == "__main__":
    main()
