"""``python -m benchmarks.retrieval``."""

import sys

from benchmarks.retrieval.cli import main

sys.exit(main())
