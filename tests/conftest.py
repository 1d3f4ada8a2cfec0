"""What all tests share: captures are kept beside pytest's own cache, not in the user's."""

from __future__ import annotations

import os
from pathlib import Path

CAPTURES = Path(__file__).parent.parent / ".pytest_cache" / "captures"
os.environ["PLACEWRIGHT_CACHE"] = str(CAPTURES)
