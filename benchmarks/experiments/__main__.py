"""``python -m benchmarks.experiments``."""

import sys

from benchmarks.experiments.cli import main

sys.exit(main())
