"""Whether drafting pays: an acceptance trace and a cost curve, put together.

The speedup of a tree is the tokens of its steps times the time of a plain step over that of its
own. Intervals are those of the acceptance, by the bootstrap over answers; costs have none.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

from drafthead.lab.paying.acceptance_trace import AcceptanceTrace, TracedAnswer
from drafthead.lab.paying.costs import CostCurve
from drafthead.lab.reports.report import Columns, Report, number, table_of
from drafthead.lab.theory.acceptance import Share, share_of

FEWEST = 8  # answers whose steps tell the acceptance at a context
SHORTEST = 128  # context that is looked at; then twice as long ones
Chosen = Callable[[int], bool]  # of a step, by the tokens before it


def everywhere(before: int) -> bool:
    """All steps."""
    return before >= 0


def near(columns: int) -> Chosen:
    """Steps after more than half of so many tokens and no more than these."""
    return lambda before: columns / 2 < before <= columns


@dataclass(frozen=True)
class Forecast:
    """The best tree somewhere."""

    where: str
    answers: int
    nodes: int
    depth: int
    tokens: Share  # of a step
    plain_ms: float
    step_ms: float

    @property
    def speedup(self) -> Share:
        """Over plain decoding."""
        ratio, tau = self.plain_ms / self.step_ms, self.tokens
        return Share(tau.value * ratio, tau.low * ratio, tau.high * ratio, tau.tries)


class Forecasts:
    """All that a trace and a curve tell."""

    def __init__(self, trace: AcceptanceTrace, curve: CostCurve):
        self.trace, self.curve = trace, curve
        contexts = sorted(answer.context for answer in trace.answers)
        self.usual = contexts[len(contexts) // 2]

    def best(
        self,
        where: str,
        answers: Sequence[TracedAnswer],
        batch: int = 1,
        columns: int | None = None,
        chosen: Chosen = everywhere,
        among: Sequence[tuple[int, int]] = (),
    ) -> Forecast:
        """The tree that is fastest there, of those whose costs are covered."""
        curve, columns = self.curve, columns or self.usual
        sizes = [s for s in among or self.trace.trees if curve.covers(batch, s[0])]
        plain = curve.ms(batch, columns, 1, 0)
        found = []
        for nodes, depth in sizes:
            place = self.trace.trees.index((nodes, depth))
            counts = [tokens_and_steps(answer, place, chosen) for answer in answers]
            step = curve.ms(batch, columns, nodes, depth)
            tokens, steps = map(sum, zip(*counts, strict=True))
            found.append((tokens / max(1, steps) / step, counts))
        (_, counts), size = max(zip(found, sizes, strict=True), key=lambda each: each[0][0])
        share = share_of([t for t, _ in counts], [s for _, s in counts])
        return Forecast(where, len(answers), *size, share, plain, curve.ms(batch, columns, *size))

    def by_batch(self) -> Iterator[Forecast]:
        """Batches of 1, 2, 4, ... as far as the costs cover the smallest tree."""
        batch = 1
        while self.curve.covers(batch, self.trace.trees[0][0]):
            yield self.best(str(batch), self.trace.answers, batch)
            batch *= 2

    def by_context(self) -> Iterator[Forecast]:
        """Contexts of 128, 256, ... tokens: the costs there, and what steps near there accept.

        Beyond the trace's contexts it is what is accepted at its longest.
        """
        columns, answers = SHORTEST, self.trace.answers
        chosen: Chosen = everywhere
        while columns <= max(SHORTEST, self.curve.longest, self.usual):
            here = [a for a in self.trace.answers if tokens_and_steps(a, 0, near(columns))[1]]
            if len(here) >= FEWEST:
                chosen, answers = near(columns), here
            yield self.best(str(columns), answers, columns=columns, chosen=chosen)
            columns *= 2

    def by_kind(self, size: tuple[int, int]) -> Iterator[Forecast]:
        """Temperatures and categories, each with the tree that is best for all."""
        for name in ("temperature", "category"):
            kinds = {getattr(answer, name) for answer in self.trace.answers}
            for kind in sorted(kinds, key=str) if len(kinds) > 1 else ():
                answers = [a for a in self.trace.answers if getattr(a, name) == kind]
                yield self.best(f"{name} {kind}", answers, among=[size])


def tokens_and_steps(answer: TracedAnswer, tree: int, chosen: Chosen) -> tuple[int, int]:
    """The tokens of the chosen steps of an answer with a tree, and how many these are."""
    lengths = answer.lengths[tree]
    before = accumulate(lengths, initial=answer.context)
    own = [length for length, place in zip(lengths, before, strict=False) if chosen(place)]
    return sum(own), len(own)


COLUMNS: Columns = {
    "answers": lambda f: str(f.answers),
    "best tree": lambda f: f"{f.nodes} nodes, K = {f.depth}",
    "tokens per step": lambda f: number(f.tokens.value),
    "plain ms": lambda f: number(f.plain_ms),
    "step ms": lambda f: number(f.step_ms),
    "over plain": lambda f: interval(f),
}


def interval(forecast: Forecast) -> str:
    """The speedup, and what 95 % of resampled answers have."""
    found = forecast.speedup
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def paying_report(trace: AcceptanceTrace, curve: CostCurve) -> Report:
    """Everything that the two tell together."""
    found = Forecasts(trace, curve)
    batches, contexts = list(found.by_batch()), list(found.by_context())
    alone = batches[0]
    kinds = list(found.by_kind((alone.nodes, alone.depth)))
    named = {"batch": batches, "context": contexts, "kind": kinds}
    tables = [
        table_of(f"{trace.head}: by {name}", {name: lambda f: f.where} | dict(COLUMNS), rows)
        for name, rows in named.items()
        if rows
    ]
    notes = [
        f"one row after {found.usual} tokens: {interval(alone)} times plain decoding, with trees "
        f"of {alone.nodes} nodes and K = {alone.depth}",
        until("batch", batches),
        until("context", contexts),
        "trees are static ones: heads that grow theirs by confidence accept somewhat more; the "
        "intervals are those of the acceptance alone",
    ]
    content = {
        name: [asdict(f) | {"speedup": asdict(f.speedup)} for f in rows]
        for name, rows in named.items()
    }
    return Report(tables, notes, {"target": trace.target, "head": trace.head, **content})


def until(name: str, rows: Sequence[Forecast]) -> str:
    """From where on drafting stops paying, if it does."""
    pays = [forecast.speedup.value > 1 for forecast in rows]
    if all(pays):
        return f"it pays at every {name} that the costs cover, up to {rows[-1].where}"
    ends = len(pays) - pays[::-1].index(True) if any(pays) else 0
    return f"it pays at no {name} from {rows[min(ends, len(rows) - 1)].where} on"
