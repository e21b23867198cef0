"""The division of a build's time: answers to learn from, learning, and measuring."""

import math
from dataclasses import dataclass
from itertools import count

import numpy as np

# What a head learns from tokens that it reads again. Muennighoff et al. (2023, arXiv 2305.16264):
# M tokens read of U distinct ones teach as much as U (1 + R (1 - exp(-(M/U - 1) / R))) fresh ones.
# Their R is 15; heads overfit after four to five epochs, which 3 says.
REPEATS = 3.0
MEASURING, LEAST_MEASURING, MOST_MEASURING = 0.3, 25.0, 900.0  # share of the time, seconds
AT_ONCE = 1e12  # tokens a second, where nothing is to be learnt
FEWEST_TOKENS = 10_000  # that a head must read, or none is trained
INVENTING = 0.2  # of the time for all, for the held-out prompts; of what is left, for a window's
HELD_OUT, TRYING = 0.15, 0.1  # of the time: for held-out answers, and for trying steps of training
LEAST = 4  # answers and prompts of the race: a verdict needs so many, whatever they take
FEWEST_STEPS = 200  # where there is time for fewer, steps have fewer rows


@dataclass(frozen=True)
class Speeds:
    """Tokens a second here."""

    answering: float
    learning: float
    rereading: float  # learning from tokens whose features are kept


@dataclass(frozen=True)
class Division:
    """Tokens of answers, and tokens that training reads."""

    answers: float
    learnt: float

    @property
    def worth(self) -> float:
        """The number of fresh tokens that teach as much."""
        if self.learnt <= self.answers:
            return self.learnt
        repeated = self.learnt / self.answers - 1
        return self.answers * (1 + REPEATS * (1 - math.exp(-repeated / REPEATS)))


def division(seconds: float, speeds: Speeds, answered: float = 0.0) -> Division:
    """The best use of the time, where so many tokens are answered already.

    All of it is for more answers and then for learning. At equal speeds, a second for each is a
    token read once; four times as fast answers are read twice.
    """
    left = max(0.0, seconds)
    choices = []
    for share in np.linspace(0, 1, 201):
        answers = answered + share * left * speeds.answering
        again = (1 - share) * left - answers / speeds.learning  # seconds after the first epoch
        learnt = answers + again * (speeds.rereading if again > 0 else speeds.learning)
        choices.append(Division(answers, learnt))
    return max((c for c in choices if c.answers), key=lambda c: c.worth)


def measuring_seconds(minutes: float) -> float:
    """Return what evaluation, race and report get of the time."""
    return float(np.clip(60 * minutes * MEASURING, LEAST_MEASURING, MOST_MEASURING))


def minutes_for(seconds: float, used: float) -> int:
    """The least minutes of a build that leave so many seconds to answers and learning.

    `used` are the seconds that go to other stages.
    """
    return next(m for m in count(1) if 60 * m - used - measuring_seconds(m) >= seconds)


def rows_of_steps(rows: int, tokens: float, a_row: float) -> int:
    """Rows of a step, at most `rows`, where so many tokens will be read, `a_row` in each row."""
    while rows > 1 and tokens < FEWEST_STEPS * rows * a_row:
        rows //= 2
    return rows
