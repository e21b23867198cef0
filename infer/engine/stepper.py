"""The steps of a batch: propose a tree, verify it in one pass of the target, commit the path.

A compiled target verifies in one call where the rule follows it, see `step.StepFunction`; else pass
and rule are calls of their own. A step without a draft is a tree of the root alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from drafthead.core.coupling import NextDraws
from drafthead.core.drafting.drafter import Committed, DraftSession, Ends, OnDevice
from drafthead.core.drafting.row_state import joined
from drafthead.core.host import to_host
from drafthead.core.sampling import RowSampling, most_probable, probabilities, race
from drafthead.core.target.features import Features, FeatureSpec
from drafthead.core.target.target import Target, TargetOutput
from drafthead.core.target.tree_cache import TreeCache
from drafthead.core.trees.recipe import (
    Proposal,
    TokenFiller,
    TreeRecipe,
    drafted_tokens,
    known,
    only,
)
from drafthead.core.trees.tree import ROOT, Budget, TokenTree
from drafthead.infer.engine.batch_run import BatchRun, Emitted
from drafthead.infer.engine.path_processing import PathProcessing
from drafthead.infer.engine.prefill import padded, prefill
from drafthead.infer.engine.step import Draws, Launched, Outcome, StepFunction, settled
from drafthead.infer.planning.planner import Planner
from drafthead.infer.request.request import Request
from drafthead.infer.verifiers import VERIFIERS, Acceptance, Verifier, rule_of_rows

# Columns that the cache has at first for new tokens; it grows when an answer is longer.
FIRST_ROOM = 512
# Positions, which all rows pay for, by which a row that has ended may be longer than all others.
IDLE_LEAD = 256
# Called with the tree of a step, the pass over it, and what is committed.
Watch = Callable[[TokenTree, TargetOutput, Outcome], None]


@dataclass(frozen=True)
class PromptPass:
    """What the pass over the prompts has read."""

    prompts: Sequence[Sequence[int]]
    ids: torch.Tensor  # [B, T] the prompts, right-padded
    lengths: torch.Tensor  # [B]
    known: int  # positions of each prompt that were read before
    features: Features  # [B, T - known, D] that the drafter reads
    hidden: torch.Tensor  # [B, D] where each prompt ends
    cache: TreeCache  # of the target

    def chosen(self, rows: Sequence[int]) -> "PromptPass":
        """This pass of chosen rows, of which one may come several times."""
        places = torch.tensor(rows, device=self.ids.device)
        return PromptPass(
            [self.prompts[row] for row in rows],
            self.ids[places],
            self.lengths[places],
            self.known,
            self.features.map(lambda states: states[places]),
            self.hidden[places],
            self.cache,
        )

    def committed(self, roots: torch.Tensor, first_tokens: Sequence[int]) -> Committed:
        """This pass as drafters receive it, with the roots [B], the first tokens of answers.

        `first_tokens` are the same as the host has them, NO_TOKEN among them.
        """
        # A drafter reads each state with the token after it: the one that it led to.
        # The last positions differ from row to row.
        following = torch.cat([self.ids[:, 1:], roots[:, None]], dim=1)
        following.scatter_(1, self.lengths[:, None] - 1, roots[:, None])
        pairs = zip(self.prompts, first_tokens, strict=True)
        return Committed(
            following[:, self.known :],
            self.features,
            self.lengths - self.known,
            known_ends=Ends(roots, self.hidden),
            host_tokens=[[*prompt[self.known + 1 :], token] for prompt, token in pairs],
            cache=self.cache,
        )


def steps_in_one_call(target: Target, request: Request) -> bool:
    """Whether steps under rules that follow the target are compiled as a whole."""
    return target.backend.compiles and request.samples_in_graphs


class Stepper:
    """A target at work on a batch: what its cache holds, and the last token of each row."""

    def __init__(
        self,
        target: Target,
        run: BatchRun,
        features: FeatureSpec,
        verifier: Verifier,
        max_nodes: int = 1,
        watch: Watch | None = None,
    ):
        """`features` are those that the drafter reads; `max_nodes` is the most nodes of a tree.

        Where `watch` is called after each pass, steps are made of separate calls.
        """
        self.target, self.run, self.rule, self.max_nodes = target, run, verifier, max_nodes
        self.watch = watch
        self.known_settings: dict[RowSampling, torch.Tensor] = {}  # of the rows that run now
        self.ahead: Launched | None = None  # the next step, where the device was asked for it
        # Called with the places of rows that a step ends, while the caches still hold them.
        self.before_end: Callable[[Sequence[int]], None] | None = None
        # A step in one call hands out no logits. The rule stays, so a record changes no text.
        needs_logits = run.record is not None or watch is not None
        follows = verifier.follows and not needs_logits
        self.in_one_call = follows and steps_in_one_call(target, run.request)
        self.read_features = features
        self.features = features.with_last()  # plain steps and trees then share compiled passes
        self.cache: TreeCache = target.new_cache()
        self.prompt_ids, self.prompt_lengths = padded(run.request.prompts, target.device)
        self.lengths = [len(prompt) for prompt in run.request.prompts]  # committed, by place
        self.roots = self.prompt_ids[:, 0]  # [B] last committed tokens, once the prompt was read
        self.processing = (
            PathProcessing(
                run.request.processors,
                run.request.prefixes or run.request.prompts,
                run.batch,
                run.greedy and verifier.follows,
            )
            if run.request.processors
            else None
        )

    @property
    def verifier(self) -> Verifier:
        """The rule of the rows that run now, see `rule_of_rows`."""
        name = rule_of_rows(self.rule.name, self.run.greedy)
        return self.rule if name == self.rule.name else VERIFIERS[name]

    def prefill(self) -> tuple[Committed, Emitted]:
        """The pass over the prompts, which also gives each row its first token."""
        read = self.pass_over_prompts()
        self.run.begin_random_step()
        first = self.next_tokens(self.target.next_logits(read.hidden))
        first_tokens = to_host(first)
        emitted = self.run.batch.take([[token] for token in first_tokens])
        # A row that failed or has ended runs along until it leaves, and must hold a real token.
        self.roots = first.clamp_min(0)
        return read.committed(self.roots, first_tokens), emitted

    def pass_over_prompts(self) -> "PromptPass":
        """The pass over the prompts.

        The cache may hold the beginning of all prompts: that is not read, and not committed again.
        """
        ids, lengths, known = self.prompt_ids, self.prompt_lengths, self.cache.longest
        request = self.run.request
        self.run.reuse(known)
        room = min(max(request.limits), FIRST_ROOM) + self.max_nodes
        features, hidden = prefill(
            self.target,
            ids,
            lengths,
            self.read_features,
            self.cache,
            room,
            request.prefill_chunk_size,
        )  # fmt: skip
        return PromptPass(request.prompts, ids, lengths, known, features, hidden, self.cache)

    def next_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """The next token [B] of each row from logits [B, V]: the most probable one, or a draw.

        NO_TOKEN where there is none.
        """
        scores = logits if self.processing is None else self.processing.after_rows(logits)
        if self.run.random is None:
            tokens = most_probable(scores)
        else:
            keys = self.run.random.ahead(1)[:, 0]
            tokens = race(probabilities(scores, self.run.sampling), keys)
        if self.run.record is not None:
            numbers, own = self.run.batch.active_numbers(), tokens[:, None].tolist()
            sampling = self.run.sampling
            self.run.record.add(numbers, sampling, logits[:, None], scores[:, None], own)
        return tokens

    def step(self, session: DraftSession, planner: Planner) -> Emitted:
        """Propose a tree, verify it, commit; where the device can, it begins the next step too."""
        draft = partial(planner.draft, partial(self.propose, session))
        if not self.in_one_call:
            return self.step_in_calls(session, draft())
        launched, self.ahead = self.ahead or self.launch(draft()), None
        # Before the tokens are read: the device has work while the host thinks.
        if planner.knows_next and self.leads_on(session):
            self.lead_on(session, launched)
            self.ahead = self.launch(draft(ahead=True))
        return self.finish(session, launched)

    def step_in_calls(self, session: DraftSession, proposal: Proposal | None) -> Emitted:
        """Verify what the session has proposed, if anything, and commit, each in a call."""
        return self.take(session, self.verified(proposal))

    def launch(self, proposal: Proposal | None) -> Launched:
        """Ask the device for a step in one call, over a proposal or a tree of the root alone."""
        if isinstance(proposal, TreeRecipe):
            recipe = proposal
        else:
            recipe = TreeRecipe.of(self.root_alone() if proposal is None else known(proposal))
            if proposal is not None and self.target.memory.is_recorded:
                # A root alone is left in its column, which may lie beyond the row's end where the
                # step before was over a tree and the host does not know how long its path was.
                recipe = recipe.padded(max(2, recipe.num_nodes))
        with self.run.stats.phase("verify"):
            verify, draws = self.function_for(recipe.filler), self.draws(recipe.max_depth)
            launched = verify(recipe, self.cache, draws, self.run.sampling.whole)
        launched.drafted = drafted_tokens(proposal, len(self.lengths))
        return launched

    def leads_on(self, session: DraftSession) -> bool:
        """Whether the next step can be asked for while the host does not know this one's tokens.

        That is so where calls are recorded.
        """
        if not (self.target.memory.is_recorded and isinstance(session, OnDevice)):
            return False
        rows = self.run.batch.running_rows()
        return any(row.active and len(row.tokens) + 1 < row.limit for row in rows)

    def lead_on(self, session: DraftSession, launched: Launched) -> None:
        """Commit a step on the device; what the host counts by is the most that it can commit."""
        most = max(self.lengths) + launched.num_nodes
        self.cache.commit(None, launched.result.committed, most)
        committed = launched.committed(self.cache)
        self.roots = committed.ends.roots
        session.commit(committed)
        self.run.begin_random_step(launched.result.length)

    def finish(self, session: DraftSession, launched: Launched) -> Emitted:
        """Read what a step has brought, and commit it unless that was done."""
        with self.run.stats.phase("verify"):
            outcome = launched.read()
        self.run.stats.verified_nodes += launched.num_nodes
        self.run.note_drafted(launched.drafted)
        return self.take(session, outcome, is_committed=launched.late is not None)

    def take(self, session: DraftSession, outcome: Outcome, is_committed: bool = False) -> Emitted:
        """Give rows what a step has brought; what had been committed is now known to the host."""
        outcome = outcome.readable()
        with self.run.stats.phase("commit"):
            self.count(outcome)
            if is_committed:
                self.cache.longest = max(self.lengths)
            else:
                self.commit(outcome)
                # After the cache: drafters with the target's own layers read it as it is now.
                session.commit(outcome.committed(self.cache))
            # Before idle rows leave: the tokens stand in the order of the batch as it ran.
            emitted = self.run.take_step(outcome.new_tokens)
            if self.before_end is not None:
                numbers = self.run.batch.running
                rows = self.run.batch.rows
                ended = [n in emitted and not rows[n].active for n in numbers]
                self.before_end([place for place, ends in enumerate(ended) if ends])
            self.keep_active(session)
        return emitted

    def verified(self, proposal: Proposal | None) -> Outcome:
        """What a pass of the target accepts of a proposal; of none, a tree of the root alone."""
        tree, output = self.scored(proposal)
        self.run.note_drafted(drafted_tokens(proposal, len(self.lengths)))
        with self.run.stats.phase("accept"):
            accept = self.accept_nothing if proposal is None else self.accept
            outcome = accept(tree, output)
        if self.watch is not None:
            self.watch(tree, output, outcome)
        return outcome

    def function_for(self, filler: TokenFiller) -> StepFunction:
        """The target's step for trees that are filled like this, made once."""
        known, key = self.target.functions, (self.features, filler)
        if key not in known:
            # Not replaced, should another thread have been quicker: graphs are made only once.
            known.setdefault(key, StepFunction(self.target, *key))
        found: StepFunction = known[key]
        return found

    def draws(self, depth: int) -> Draws | None:
        """What the target's own tokens are drawn with, the same numbers as in plain decoding."""
        if self.run.random is None:
            return None
        # One more than the longest path: the bonus token is drawn as well.
        return Draws(self.settings(self.run.sampling), self.run.random.ahead(depth + 1))

    def settings(self, sampling: RowSampling) -> torch.Tensor:
        """`RowSampling.settings` [B, 4] on the target's device, where they are kept."""
        if sampling not in self.known_settings:
            if len(self.known_settings) > 1:  # rows have joined or left
                self.known_settings.clear()
            self.known_settings[sampling] = sampling.settings(self.target.device)
        return self.known_settings[sampling]

    def propose(self, session: DraftSession, budget: Budget) -> Proposal:
        """The session's proposal for the next step within a budget."""
        with self.run.stats.phase("draft"):
            random = self.run.random if self.verifier.draws_children else self.next_draws(budget)
            session.wanted = wanted = self.run.wanted
            found = session.propose(budget, self.run.draft_sampling, random)
            kept = [own is None or bool(own) for own in wanted or ()]
            return found if wanted is None else only(found, kept)

    def root_alone(self) -> TokenTree:
        """A tree that proposes nothing."""
        return TokenTree.from_shape(ROOT, self.roots[:, None])

    def next_draws(self, budget: Budget) -> NextDraws | None:
        """What a draft can know of the target's draws, under rules that follow these."""
        if self.run.random is None or not self.verifier.follows:
            return None
        keys = self.run.random.ahead(max(1, budget.depth))
        return NextDraws(keys, self.settings(self.run.draft_sampling))

    def scored(self, proposal: Proposal | None) -> tuple[TokenTree, TargetOutput]:
        """The tree of a proposal, and a pass of the target over its nodes."""
        tree = self.root_alone() if proposal is None else known(proposal)
        self.run.stats.verified_nodes += tree.num_nodes
        with self.run.stats.phase("verify"):
            return tree, self.verify(tree)

    def verify(self, tree: TokenTree) -> TargetOutput:
        """One pass of the target over all nodes of a tree."""
        assert self.cache.lengths is not None
        # Positions follow depth, not the place in the tree: siblings share one, in other columns.
        positions = self.target.legal_positions(self.cache.lengths[:, None] + tree.depths)
        mask = self.target.tree_mask(self.cache, tree.ancestors)
        tokens = tree.tokens.clamp_min(0)  # padding nodes are computed and never accepted
        return self.target.run(tokens, positions, mask, self.features, self.cache)

    def accept(self, tree: TokenTree, output: TargetOutput) -> Outcome:
        """Apply the rule to the target's scores, in the form that it reads."""
        assert self.cache.lengths is not None
        run, verifier, scores = self.run, self.verifier, output.logits
        # Each node gets the penalties of its own path, as if the answer had ended there.
        if self.processing is not None:
            scores = self.processing.after_nodes(tree, scores)
        reads_probs = verifier.reads == "probs"
        read = probabilities(scores, run.sampling) if reads_probs else scores
        accepted = verifier.rule(tree, read, run.random)
        result = settled(tree, accepted, output.features, self.cache.lengths)
        outcome = Outcome.of(result, to_host(result.table), is_moved=False)
        if run.record is not None:
            rows = torch.arange(len(scores), device=scores.device)[:, None]
            on_path = rows, accepted.path[:, : outcome.width]  # [B, P]
            numbers = run.batch.active_numbers()
            taken = output.logits[on_path], scores[on_path]
            run.record.add(numbers, run.sampling, *taken, outcome.new_tokens)
        return outcome

    def accept_nothing(self, tree: TokenTree, output: TargetOutput) -> Outcome:
        """The outcome of a step without a draft, under any rule: the target's own next token."""
        tokens = self.next_tokens(output.logits[:, 0])
        alone = Acceptance(torch.zeros_like(tokens)[:, None], torch.ones_like(tokens), tokens)
        assert self.cache.lengths is not None
        result = settled(tree, alone, output.features, self.cache.lengths)
        return Outcome.of(result, to_host(result.table), is_moved=False)

    def count(self, outcome: Outcome) -> None:
        """Add what a step has brought to the lengths of rows."""
        pairs = zip(self.lengths, outcome.new_tokens, strict=True)
        # A step commits the root and the accepted nodes; its bonus is the next root, not yet read.
        # So the number of new tokens is also that of new positions.
        self.lengths = [old + len(new) for old, new in pairs]

    def commit(self, outcome: Outcome) -> None:
        """Keep the accepted path in the cache; the token after it is the next root."""
        path = None if outcome.in_place else outcome.acceptance.path[:, : outcome.width]
        self.cache.commit(path, outcome.committed_lengths, max(self.lengths))
        self.roots = outcome.acceptance.bonus

    def keep_active(self, session: DraftSession) -> None:
        """Take rows that have ended out of the running batch, once many are idle.

        Where passes are recorded a power of two stays. Idle rows that have become longer than all
        others go on as copies of the shortest of these.
        """
        places = self.run.drop_idle(self.target.memory.size)
        if places is None:
            active = [row.active for row in self.run.batch.running_rows()]
            places = shortened(self.lengths, active)
        if places is not None:
            self.ahead = None  # the next step is another one, or there is none
            if places:
                self._go_on_with(places, session)

    def fill_up(self, session: DraftSession) -> int:
        """Let rows that have ended make the batch a power of two; returns how many were added.

        Where steps are recorded each number of rows would ask for recordings of its own.
        """
        rows = len(self.lengths)
        missing = self.target.memory.size(rows) - rows
        if not missing or not self.in_one_call:
            return 0
        places = [*range(rows), *[min(range(rows), key=self.lengths.__getitem__)] * missing]
        self.run.add_idle(places[rows:])
        self._go_on_with(places, session)
        return missing

    def _go_on_with(self, places: Sequence[int], session: DraftSession) -> None:
        """Go on with the rows at these places; one that comes twice goes on in two ways."""
        # All that is kept by place goes through the same choice, or rows would mix.
        self.lengths = [self.lengths[place] for place in places]
        rows = torch.tensor(places, device=self.target.device)
        self.roots = self.roots[rows]
        self.cache.keep_rows(rows, max(self.lengths))
        session.keep_rows(rows)

    def join(self, other: "Stepper", order: Sequence[int]) -> None:
        """Go on with rows of both, see `RowState.join_rows`; they are numbered again.

        `other` has read its prompts and must not step again.
        """
        self.ahead = None
        self.lengths = joined(self.lengths, other.lengths, order)
        self.cache.join_rows(other.cache, order, max(self.lengths))
        self.roots = joined(self.roots, other.roots, order)
        if self.processing is not None and other.processing is not None:
            self.processing.join(other.processing, order)
        self.run.join(other.run, order)


def shortened(lengths: Sequence[int], active: Sequence[bool]) -> list[int] | None:
    """The places of the rows to go on with where idle ones have run on beyond all others: for each
    of these the shortest of those that are active. None where they have not.

    Of an idle row of length 900 beside active ones of 80 and 60 the places are 2 1 2.
    """
    kept = [place for place, is_active in enumerate(active) if is_active]
    if not kept or max(lengths) <= max(lengths[place] for place in kept) + IDLE_LEAD:
        return None
    shortest = min(kept, key=lengths.__getitem__)
    return [place if is_active else shortest for place, is_active in enumerate(active)]
