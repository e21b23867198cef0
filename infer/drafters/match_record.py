"""How often the token after a match was right, by the length of the match."""

import math
from itertools import accumulate

# What is believed at first: the share of tokens that were right after matches of 1, 2, ... tokens
# in SmolLM2-135M's answers, by benchmarks/matches.py. Longer matches count as the last.
FIRST_SHARES = (
    *(0.21, 0.53, 0.60, 0.69, 0.73, 0.77, 0.80, 0.83, 0.84, 0.86, 0.87, 0.88, 0.89, 0.90, 0.90),
    *(0.91, 0.92, 0.92, *(0.93,) * 4, *(0.94,) * 7, 0.96, 0.96, 0.98),
)  # fmt: skip
FIRST_WEIGHT = 20.0  # tokens that the first belief counts as
MEMORY = 500  # tokens after matches of a length by which it is judged: what is older fades


class MatchRecord:
    """Learns from every token that is committed after a match, drafted or not."""

    def __init__(self) -> None:
        self.seen = [FIRST_WEIGHT] * len(FIRST_SHARES)
        self.right = [FIRST_WEIGHT * share for share in FIRST_SHARES]

    def add(self, length: int, was_right: bool) -> None:
        """A token came after a match of so many tokens."""
        place = min(length, len(self.seen)) - 1
        keep = 1 - 1 / MEMORY
        self.seen[place] = keep * self.seen[place] + 1
        self.right[place] = keep * self.right[place] + was_right

    def share(self, length: int) -> float:
        """The share of right tokens after matches of a length; never 0 or 1."""
        place = min(length, len(self.seen)) - 1
        return (self.right[place] + 0.5) / (self.seen[place] + 1)

    def log_chances(self, length: int, count: int) -> list[float]:
        """Logarithms of how likely 1, 2, ... `count` tokens after a match are all right.

        Each right one makes the match longer: after 4 tokens with shares 1/2 for 4 and 3/4 for 5,
        the chances of one and two tokens are 1/2 and 3/8.
        """
        return list(accumulate(math.log(self.share(length + more)) for more in range(count)))
