"""``python -m benchmarks.experiments``."""

import sys

from benchmarks.experiments.run import main

sys.exit(main())
