"""What chains of each length cost here: seconds of drafting and verifying, and arithmetic."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from drafthead.lab.profiling.pass_times import (
    ROUNDS,
    after_random_text,
    pass_alone,
    proposals_alone,
    time_passes,
)
from drafthead.lab.speedup_model import StepParts
from drafthead.lab.theory.chains import Chains, chain_budget

TIMED_LENGTHS = (1, 2, 4, 8, 16)  # the others lie on straight lines between these


@dataclass(frozen=True)
class PassRatios:
    """Passes alone, in passes of the target over one token; an entry for each of `lengths`.

    Longer chains are never cheaper: where they were, by chance, the shorter one's cost stands.
    """

    lengths: tuple[int, ...]  # K
    draft: tuple[float, ...]  # of a chain of K tokens
    verify: tuple[float, ...]  # over K + 1 tokens


@dataclass(frozen=True)
class ChainCosts:
    """What a step with a chain of K tokens takes, in plain steps: never less than one."""

    passes: PassRatios
    plain: StepParts  # of a plain step: its pass, and the host's part of it
    host: float  # of a step with a chain, beside its passes

    def draft(self, length: int) -> float:
        """Drafting `length` tokens."""
        known = self.passes
        passes = np.interp(length, (0, *known.lengths), (0.0, *known.draft))
        return float(passes) * self.plain.verify

    def verify(self, length: int) -> float:
        """The target's pass over `length` tokens and the root."""
        known = self.passes
        passes = np.interp(length, (0, *known.lengths), (1.0, *known.verify))
        return float(passes) * self.plain.verify

    def step(self, length: int) -> float:
        """A whole step; one without a draft is a plain step, and none is quicker."""
        if not length:
            return 1.0
        return max(1.0, self.draft(length) + self.verify(length) + self.host)


def timed_lengths(longest: int) -> tuple[int, ...]:
    """The lengths that are timed, of chains of up to `longest` tokens: that one, and some below."""
    return (*(length for length in TIMED_LENGTHS if length < longest), longest)


def time_chains(chains: Chains) -> PassRatios:
    """Time chains of some lengths, in turns with the pass that verifies each and a plain one."""
    lengths = timed_lengths(chains.longest)
    draft, verify = [], []
    for length in tqdm(lengths, desc=f"timing {chains.name}", unit="length", leave=False):
        budget, sizes = chain_budget(length), (1, length + 1)
        drafter = chains.drafter(length)
        times = time_passes(chains.target, drafter, 1, sizes, ROUNDS, budgets=[budget])
        draft.append(times.draft[budget] / times.verify[1])
        verify.append(times.verify[length + 1] / times.verify[1])
    return PassRatios(lengths, rising(0.0, draft), rising(1.0, verify))


def rising(least: float, ratios: Sequence[float]) -> tuple[float, ...]:
    """Ratios of which none is below an earlier one or `least`: 0.9 1.3 1.2 become 1 1.3 1.3."""
    return tuple(accumulate(ratios, max, initial=least))[1:]


@torch.no_grad()
def operations_ratio(chains: Chains, length: int) -> float:
    """c^: arithmetic of one drafted token of a chain / that of the target's pass over one token.

    Additions and multiplications of matrix products and attention are counted while both run.
    """
    drafter = chains.drafter(length)
    stepper, prompt = after_random_text(chains.target, drafter, 1, length + 1)
    target = operations(pass_alone(stepper, 1))
    ((_, propose),) = proposals_alone(drafter, [chain_budget(length)], stepper, prompt)
    return operations(propose) / length / target


def operations(call: Callable[[], object]) -> int:
    """Floating-point operations of torch's matrix products and attention in a call."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()
