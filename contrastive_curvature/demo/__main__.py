"""``python -m contrastive_curvature.demo``."""

import sys

from contrastive_curvature.demo.cli import main

sys.exit(main())
