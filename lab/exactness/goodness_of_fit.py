"""Do counts follow a law? Pearson's chi-square test, and the deviation that it notices."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy import special

# The chi-square law is an approximation that needs a few expected counts in every cell.
FEWEST_EXPECTED = 5.0


@dataclass(frozen=True)
class Fit:
    """Counts of one experiment, compared with the probabilities that they should follow.

    `total_variation` is half the sum of |share - probability| over the cells; for counts that do
    follow the law its mean is `expected_total_variation`, by chance alone. `largest_deviation` is
    |share - probability| of the cell that is furthest off in units of its `standard_error`.
    """

    samples: int
    impossible: int  # samples of probability 0
    cells: int
    statistic: float  # sum of (count - expected)^2 / expected
    total_variation: float
    expected_total_variation: float
    largest_deviation: float
    standard_error: float


def fit(counts: torch.Tensor, probs: torch.Tensor, impossible: int | None = None) -> Fit:
    """Compare counts [C] with probabilities [C], rare cells pooled.

    Cells of which fewer than `FEWEST_EXPECTED` counts are expected become one, and that one joins
    the rarest of the others if it is still too small. A single sample of probability 0 refutes the
    law, so these are reported separately: `impossible`, by default the counts in such cells.
    """
    counts, probs = counts.double(), probs.double()
    samples = counts.sum()
    if impossible is None:
        impossible = int(counts[probs <= 0].sum())
    counts, probs = pooled(counts, probs / probs.sum(), float(samples))
    shares, errors = counts / samples, (probs * (1 - probs) / samples).sqrt()
    deviations = (shares - probs).abs()
    furthest = int((deviations / errors.clamp_min(torch.finfo(errors.dtype).tiny)).argmax())
    return Fit(
        samples=int(samples),
        impossible=impossible,
        cells=len(probs),
        statistic=float((samples * deviations**2 / probs).sum()),
        total_variation=float(deviations.sum() / 2),
        # The mean of |x| is sqrt(2 / pi) standard deviations if x is normal around 0.
        expected_total_variation=float(errors.sum() / 2 * math.sqrt(2 / math.pi)),
        largest_deviation=float(deviations[furthest]),
        standard_error=float(errors[furthest]),
    )


def pooled(
    counts: torch.Tensor, probs: torch.Tensor, samples: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts [C] and probabilities [C] with the rare cells pooled into one, the last.

    With 100 samples, probabilities (.50, .03, .46, .01) become (.50, .46 + .04): the rare cells
    together would have 4 expected counts, so they join the rarest of the others.
    """
    probs, order = probs.sort(descending=True)
    counts = counts[order]
    frequent = int((probs * samples >= FEWEST_EXPECTED).sum())
    if frequent > 0 and float(probs[frequent:].sum()) * samples < FEWEST_EXPECTED:
        frequent -= 1

    def pool(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([values[:frequent], values[frequent:].sum()[None]])

    return pool(counts), pool(probs)


def chance_of_worse(fits: Sequence[Fit]) -> float:
    """The p-value of independent experiments together.

    If all laws hold, the sum of their statistics is a chi-square with the sum of their degrees of
    freedom. Samples of probability 0 make it 0.
    """
    if any(each.impossible for each in fits):
        return 0.0
    degrees = freedom(fits)
    if degrees == 0:
        return 1.0
    return float(special.chdtrc(degrees, sum(each.statistic for each in fits)))


def freedom(fits: Sequence[Fit]) -> int:
    """Degrees of freedom of independent experiments together."""
    return sum(each.cells - 1 for each in fits)


def detectable(fits: Sequence[Fit], false_alarm: float, power: float) -> float:
    """The total variation that is noticed with chance `power`, however it is spread over the cells.

    A law at total variation d (on the cells; the mean over all samples) moves the statistic to a
    non-central chi-square whose non-centrality n sum((p' - p)^2 / p) is at least 4 n d^2, by Cauchy
    and Schwarz. So d = sqrt(non-centrality / 4 n) for the least non-centrality that exceeds the
    critical value with that chance. Infinite where there is only one cell.
    """
    degrees = freedom(fits)
    if degrees == 0:
        return math.inf
    # The statistic that exact counts exceed with chance `false_alarm`; then the non-centrality with
    # which it is exceeded with chance `power`. scipy names both after their distribution.
    critical = special.chdtri(degrees, false_alarm)
    enough = special.chndtrinc(critical, degrees, 1 - power)
    return math.sqrt(enough / (4 * sum(each.samples for each in fits)))
