"""What all tests share: where captures are kept, and how threads wait."""

from __future__ import annotations

import os
from pathlib import Path

CAPTURES = Path(__file__).parent.parent / ".pytest_cache" / "captures"
os.environ["PLACEWRIGHT_CACHE"] = str(CAPTURES)

# Threads of several test processes that wait by spinning take the cores from those that work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
