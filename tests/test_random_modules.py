"""Random small modules compute placed what they compute in eager PyTorch, or are refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.marks import one_thread, two_cores  # noqa: E402
from tests.random_modules import check, draw, run_case, shrink  # noqa: E402

CHUNKS, CASES = 8, 250  # of each chunk

pytestmark = [two_cores, one_thread]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_modules_equal_eager_pytorch_to_the_bit_or_are_refused(chunk):
    counts = {"equal": 0, "refused": 0, "invalid": 0}
    for seed in range(chunk * CASES, (chunk + 1) * CASES):
        outcome = run_case(seed)
        if outcome.is_failure:
            smallest = shrink(draw(seed), tries=200)
            pytest.fail(f"seed {seed}: {check(smallest)}\n{smallest.describe()}", pytrace=False)
        counts[outcome.kind] += 1
    assert counts["invalid"] < 0.2 * CASES
    assert counts["refused"] < 0.6 * CASES


def test_a_case_is_the_same_for_the_same_seed():
    assert draw(3) == draw(3)
    assert draw(3) != draw(4)
