"""``python -m benchmarks.ndigit``."""

from __future__ import annotations

import sys

from benchmarks.ndigit.cli import main

if __name__ == "__main__":
    sys.exit(main())
