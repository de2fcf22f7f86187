"""``python -m contrastive_curvature``: the same as the command ``contrastive-curvature``."""

import sys

from contrastive_curvature.apps.cli import main

if __name__ == "__main__":
    sys.exit(main())
