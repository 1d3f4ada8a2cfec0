"""What all tests share: where captures are kept, and how threads wait."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CAPTURES = Path(__file__).parent.parent / ".pytest_cache" / "captures"
os.environ["PLACEWRIGHT_CACHE"] = str(CAPTURES)

# Threads of several test processes that wait by spinning take the cores from those that work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture
def one_thread():
    """Compute an unplaced module as one core would, from the same random numbers."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
