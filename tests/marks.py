"""Marks that many tests share."""

from __future__ import annotations

import os

import pytest

two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2 if hasattr(os, "sched_getaffinity") else True,
    reason="two cores are needed as two devices",
)
one_thread = pytest.mark.usefixtures("one_thread")
any_call = pytest.mark.filterwarnings("ignore::placewright.execute.calls.NewProgramWarning")
