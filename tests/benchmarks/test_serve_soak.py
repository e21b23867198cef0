"""What the measurement of fairness takes for a success."""

import pytest
from serve_soak import FAIR, WAITED, is_fair


@pytest.mark.parametrize(
    ("waited", "ratio", "fair"), [(True, FAIR, True), (True, FAIR + 1, False), (False, 1.0, False)]
)
def test_short_answers_are_fast_only_beside_long_ones(waited, ratio, fair) -> None:
    assert is_fair({WAITED: waited, "ratio of medians": ratio}) == fair
