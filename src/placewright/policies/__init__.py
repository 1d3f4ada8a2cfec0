"""
Learned placers: policies trained by policy gradient on step times.

This package owns one learned placer a file (`colocrl`, `hierarchical`), and what they share:
`settings` (the presets), `features`, `seq2seq` (the networks), `rewards`, `training`, `checkpoint`,
`interrupt`; `learned` makes placers of them, with `memory` and `rehearsal` before a run begins.
`settings`, `rewards`, `features` and these three can be read without PyTorch.
"""

from __future__ import annotations

from placewright.policies.learned import POLICIES, Learned, with_options
from placewright.policies.settings import ColocRL, Hierarchical, Training

__all__ = ["POLICIES", "ColocRL", "Hierarchical", "Learned", "Training", "with_options"]
