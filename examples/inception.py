"""
A narrow Inception-V3 on one image, which two CPU cores can share: what ``make demo`` runs.

``placewright measure examples/inception.py:build --plan demo/two-cores.plan.json`` runs it again.
"""

from __future__ import annotations

from typing import Any

from placewright.bench.fidelity_models import inception_inference


def build() -> dict[str, Any]:
    """Give one forward pass."""
    return inception_inference()
