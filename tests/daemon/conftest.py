"""What the daemon's tests share: the machine's seeded world, and the toy evaluations of tests/integration."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
for folder in (TESTS / "machine", TESTS / "integration", TESTS / "redis"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
