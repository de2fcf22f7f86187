"""``python -m benchmarks.transfer``."""

from __future__ import annotations

import sys

from benchmarks.transfer.cli import main

if __name__ == "__main__":
    sys.exit(main())
