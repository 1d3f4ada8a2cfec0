"""PyTorch's operators compute placed what they compute in eager PyTorch, or are refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest")

from tests.marks import one_thread, two_cores  # noqa: E402
from tests.operator_sample_cases import IN_PLACE, KINDS, TRACED, operators  # noqa: E402
from tests.operator_samples import run_operator  # noqa: E402

CHUNKS = 8  # of all operators
STRIDE = 12  # of operators that are also called with gradients, in place and on strided inputs

pytestmark = [two_cores, one_thread]


def run_all(names, kinds, samples):
    """Run operators; count what came of them, and fail with what was wrong."""
    counts = dict.fromkeys(("equal", "traced", "refused", "invalid"), 0)
    failures = []
    for name in names:
        for found in run_operator(name, kinds, samples):
            if "starts" in found:
                continue
            kind = found["kind"]
            if kind not in counts or (kind == "traced" and name not in TRACED):
                failures.append(f"{name}, {found['how']} {found['sample']}: {found['detail']}")
            else:
                counts[kind] += 1
    assert not failures, "\n".join(failures)
    return counts


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_operators_equal_eager_pytorch_to_the_bit_or_are_refused(chunk):
    counts = run_all([*operators()][chunk::CHUNKS], ["forward"], 1)
    assert counts["equal"] > 0.8 * sum(counts.values())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "forward"])
def test_operators_equal_eager_pytorch_however_they_are_called(kind):
    names = [*operators()][KINDS.index(kind) :: STRIDE]
    counts = run_all(names, [kind], 1)
    assert counts["equal"] > 0.8 * (sum(counts.values()) - counts["invalid"])


def test_a_gradient_of_zeros_that_takes_no_memory_equals_eager_pytorchs():
    assert run_all(["sgn"], ["gradient"], 1)["equal"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_more_samples_of_operators_equal_eager_pytorch_or_are_refused(chunk, kind):
    counts = run_all([*operators()][chunk::CHUNKS], [kind], 6)
    assert counts["equal"] > (0.7 if kind in IN_PLACE else 0.8) * sum(counts.values())
