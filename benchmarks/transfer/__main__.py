"""``python -m benchmarks.transfer``."""

import sys

from benchmarks.transfer.run import main

sys.exit(main())
