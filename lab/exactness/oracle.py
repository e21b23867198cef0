"""The decoder that tests of exactness compare with: the target alone, by other code.

It shares prompt pass, cache and sampling with the engine, but neither trees nor verifiers nor
graphs, so that an error in those cannot hide.
"""

from functools import partial

import torch

from drafthead.core.drafting.drafter import Committed, DraftSession, Ends
from drafthead.core.host import to_host
from drafthead.infer import Decoder
from drafthead.infer.engine.batch_run import BatchRun, Emitted
from drafthead.infer.engine.stepper import Stepper, Watch
from drafthead.infer.planning.planner import Planner
from drafthead.infer.scheduling.method import Method


class OracleDecoder(Decoder):
    """Plain decoding without trees, verifiers and graphs; takes the options of `Decoder`."""

    def method(self, run: BatchRun) -> Method:
        made = super().method(run)
        return PlainMethod(made.target, made.drafter, made.rule, made.planner, made.most_nodes)


class PlainMethod(Method):
    """One token a pass, whatever the target."""

    def stepper(self, run: BatchRun, watch: Watch | None = None) -> Stepper:
        return PlainStepper(self.target, run, self.drafter.features, self.rule)


class PlainStepper(Stepper):
    """One token of each row a pass."""

    def step(self, session: DraftSession, planner: Planner) -> Emitted:
        proposal = planner.draft(partial(self.propose, session))
        assert proposal is None, "the oracle never drafts"
        self.run.stats.verified_nodes += 1
        committed = self.feed_roots()
        with self.run.stats.phase("commit"):
            session.commit(committed)
            emitted = self.run.take_step([[token] for token in to_host(self.roots)])
            self.roots = self.roots.clamp_min(0)  # NO_TOKEN of rows that have ended
            self.keep_active(session)
        return emitted

    def feed_roots(self) -> Committed:
        """A pass over the last committed token of each row, and the tokens picked after them."""
        cache = self.cache
        assert cache.lengths is not None
        with self.run.stats.phase("verify"):
            positions = self.target.legal_positions(cache.lengths[:, None])
            node = torch.ones(1, 1, 1, dtype=torch.bool, device=positions.device)
            mask = cache.additive_mask(node, self.target.dtype)
            output = self.target.run(self.roots[:, None], positions, mask, self.features, cache)
            self.lengths = [length + 1 for length in self.lengths]
            # A single row is where it belongs; the others are in the column of the longest.
            path = torch.zeros_like(positions) if len(self.lengths) > 1 else None
            cache.commit(path, cache.lengths + 1, max(self.lengths))
        with self.run.stats.phase("accept"):
            self.roots = self.next_tokens(output.logits[:, -1])
        last = output.features.last
        ends = Ends(self.roots, None if last is None else last[:, 0])
        ones = torch.ones_like(self.roots)
        return Committed(self.roots[:, None], output.features, ones, known_ends=ends)
