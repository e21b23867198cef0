"""The steps of a batch: propose a tree, verify it in one pass of the target, commit the path.

A recorded target verifies in one call where the rule follows it, see `step.StepFunction`; else pass
and rule are calls of their own. A step without a draft is a tree of the root alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from drafthead.core.coupling import NextDraws
from drafthead.core.drafting.drafter import Committed, Drafter, DraftSession, Ends, OnDevice
from drafthead.core.host import to_host
from drafthead.core.row_state import joined
from drafthead.core.sampling import RowSampling, most_probable, probabilities, race
from drafthead.core.target.features import Features, FeatureSpec
from drafthead.core.target.target import Target, TargetOutput
from drafthead.core.target.tree_cache import TreeCache
from drafthead.core.trees.guesses import Proposal, drafted_tokens, known, only
from drafthead.core.trees.tree import ROOT, Budget, TokenTree
from drafthead.infer.engine.batch_run import BatchRun, Emitted
from drafthead.infer.engine.path_processing import PathProcessing
from drafthead.infer.engine.prefill import ReadState, padded, prefill, prefill_drafter
from drafthead.infer.engine.step import Draws, Launched, Outcome, Scored, StepFunction, settled
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
    """The results of the pass over the prompts."""

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
    """Whether steps under rules that follow the target are recorded as a whole."""
    return target.backend.records and request.samples_in_graphs


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
        self.features = features.with_last()  # plain steps and trees then share recorded passes
        self.cache: TreeCache = target.new_cache()
        self.prompt_ids, self.prompt_lengths = padded(run.request.prompts, target.device)
        self.lengths = [len(prompt) for prompt in run.request.prompts]  # committed, by place
        self.roots = self.prompt_ids[:, 0]  # [B] last committed tokens, once the prompt was read

    @property
    def processing(self) -> PathProcessing | None:
        """The logits processors of the rows that run now; None for requests without any."""
        run = self.run
        if not run.request.processors:
            return None
        greedy = run.greedy and self.rule.follows
        return PathProcessing(run.running_rows(), run.request.end_ids, greedy)

    @property
    def verifier(self) -> Verifier:
        """The rule of the rows that run now, see `rule_of_rows`."""
        name = rule_of_rows(self.rule.name, self.run.greedy)
        return self.rule if name == self.rule.name else VERIFIERS[name]

    def begin(self, drafter: Drafter, past: ReadState | None) -> tuple[DraftSession, Emitted]:
        """Read the prompts: the drafter's session, and the first token of each row.

        `past` is what was read of the beginning of all of them; it is used up.
        """
        if past is not None:
            self.cache = past.cache
        committed, emitted = self.prefill()
        if past is not None:
            session = past.session
            session.commit(committed)
        else:
            session = prefill_drafter(drafter, self.prompt_ids, self.prompt_lengths, committed)
        self.keep_active(session)  # answers of one token have ended already
        return session, emitted

    def prefill(self) -> tuple[Committed, Emitted]:
        """The pass over the prompts, which also gives each row its first token."""
        read = self.pass_over_prompts()
        self.run.begin_random_step()
        first = self.next_tokens(self.target.next_logits(read.hidden))
        first_tokens = to_host(first)
        emitted = self.run.take([[token] for token in first_tokens])
        # A row that failed or has ended runs along until it leaves, and must hold a real token.
        self.roots = first.clamp_min(0)
        committed = read.committed(self.roots, first_tokens)
        return replace(committed, salt=self.run.request.cache_salt), emitted

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
        processing = self.processing
        scores = logits if processing is None else processing.after_rows(logits)
        tokens = self.chosen(scores)
        if self.run.record is not None:
            numbers, own = self.run.active_numbers(), tokens[:, None].tolist()
            sampling = self.run.sampling
            self.run.record.add(numbers, sampling, logits[:, None], scores[:, None], own)
        return tokens

    def chosen(self, scores: torch.Tensor) -> torch.Tensor:
        """The target's own token [B] by processed logits [B, V]."""
        if self.run.random is None:
            return most_probable(scores)
        keys = self.run.random.ahead(1)[:, 0]
        return race(probabilities(scores, self.run.sampling), keys)

    def step(self, session: DraftSession, planner: Planner) -> Emitted:
        """Propose a tree, verify it, commit; where the device can, it begins the next step too."""
        draft = partial(planner.draft, partial(self.propose, session))
        launched, self.ahead = self.ahead or self.launch(draft()), None
        # Before the tokens are read: the device has work while the host thinks.
        if planner.knows_next and self.leads_on(session):
            self.lead_on(session, launched)
            self.ahead = self.launch(draft(ahead=True))
        return self.finish(session, launched)

    def launch(self, proposal: Proposal | None) -> Launched:
        """Ask the device for a step over a proposal, or over a tree of the root alone."""
        verify = self.verify_in_one_call if self.in_one_call else self.verify_in_calls
        launched = verify(proposal)
        launched.drafted = drafted_tokens(proposal, len(self.lengths))
        return launched

    def verify_in_one_call(self, proposal: Proposal | None) -> Launched:
        """A step that is recorded as a whole."""
        tree = self.root_alone() if proposal is None else known(proposal)
        if proposal is not None and self.target.memory.is_recorded:
            # A root alone is left in its column, which may lie beyond the row's end where the
            # step before was over a tree and the host does not know how long its path was.
            tree = tree.padded(max(2, tree.num_nodes))
        with self.run.stats.phase("verify"):
            draws = self.draws(tree.max_depth)
            return self.step_function()(tree, self.cache, draws, self.run.sampling.whole)

    def verify_in_calls(self, proposal: Proposal | None) -> Launched:
        """A pass over the tree, then the rule, in the form of the scores that it reads."""
        run, tree = self.run, self.root_alone() if proposal is None else known(proposal)
        with run.stats.phase("verify"):
            output = self.verify(tree)
        with run.stats.phase("accept"):
            scores = output.logits
            # Each node gets the penalties of its own path, as if the answer had ended there.
            if (processing := self.processing) is not None:
                scores = processing.after_nodes(tree, scores)
            if proposal is None:  # the target's own next token, under any rule
                tokens = self.chosen(scores[:, 0])
                path = torch.zeros_like(tokens)[:, None]
                accepted = Acceptance(path, torch.ones_like(tokens), tokens)
            else:
                reads_probs = self.verifier.reads == "probs"
                read = probabilities(scores, run.sampling) if reads_probs else scores
                accepted = self.verifier.rule(tree, read, run.random)
            assert self.cache.lengths is not None
            result = settled(tree, accepted, output.features, self.cache.lengths)
        return Launched(result, tree.num_nodes, scored=Scored(tree, output, scores))

    def leads_on(self, session: DraftSession) -> bool:
        """Whether the next step can be asked for while the host does not know this one's tokens.

        That is so where calls are recorded.
        """
        is_recorded = self.in_one_call and self.target.memory.is_recorded
        if not (is_recorded and isinstance(session, OnDevice)):
            return False
        rows = self.run.running_rows()
        return any(row.active and len(row.tokens) + 1 < row.limit for row in rows)

    def lead_on(self, session: DraftSession, launched: Launched) -> None:
        """Commit a step on the device; what the host counts by is the most that it can commit."""
        most = max(self.lengths) + launched.num_nodes
        self.commit(session, launched, None, most)
        self.run.begin_random_step(launched.result.length)

    def finish(self, session: DraftSession, launched: Launched) -> Emitted:
        """Read what a step has brought, commit it unless that was done, and give it to the rows."""
        with self.run.stats.phase("verify"):
            outcome = launched.read()
        self.run.stats.verified_nodes += launched.num_nodes
        self.run.note_drafted(launched.drafted)
        if launched.scored is not None:
            self.show(launched.scored, outcome)
        with self.run.stats.phase("commit"):
            # A step commits the root and the accepted nodes; its bonus is the next root, not yet
            # read. So the number of new tokens is also that of new positions.
            pairs = zip(self.lengths, outcome.new_tokens, strict=True)
            self.lengths = [old + len(new) for old, new in pairs]
            if launched.late is not None:
                self.cache.longest = max(self.lengths)
            else:
                path = None if outcome.in_place else outcome.acceptance.path[:, : outcome.width]
                self.commit(session, launched, path, max(self.lengths))
            # Before idle rows leave: the tokens stand in the order of the batch as it ran.
            emitted = self.run.take_step(outcome.new_tokens)
            if self.before_end is not None:
                numbers, rows = self.run.running, self.run.rows
                ended = [n in emitted and not rows[n].active for n in numbers]
                self.before_end([place for place, ends in enumerate(ended) if ends])
            self.keep_active(session)
        return emitted

    def show(self, scored: Scored, outcome: Outcome) -> None:
        """Give the scores of a pass to whoever wants them."""
        (tree, output, scores), run = scored, self.run
        if self.watch is not None:
            self.watch(tree, output, outcome)
        if run.record is not None:
            rows = torch.arange(len(scores), device=scores.device)[:, None]
            on_path = rows, outcome.acceptance.path[:, : outcome.width]  # [B, P]
            numbers, taken = run.active_numbers(), (output.logits[on_path], scores[on_path])
            run.record.add(numbers, run.sampling, *taken, outcome.new_tokens)

    def step_function(self) -> StepFunction:
        """The target's step that keeps these features, made once."""
        functions, key = self.target.functions, (StepFunction, self.features)
        if key not in functions:
            # Not replaced, should another thread have been quicker: all is recorded only once.
            functions.setdefault(key, StepFunction(self.target, self.features))
        found: StepFunction = functions[key]
        return found

    def draws(self, depth: int) -> Draws | None:
        """Settings and numbers of the target's own draws, the same as in plain decoding."""
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
            session.forms = self.run.forms
            found = session.propose(budget, self.run.draft_sampling, random)
            kept = [own is None or bool(own) for own in wanted or ()]
            return found if wanted is None else only(found, kept)

    def root_alone(self) -> TokenTree:
        """A tree that proposes nothing."""
        return TokenTree.from_shape(ROOT, self.roots[:, None])

    def next_draws(self, budget: Budget) -> NextDraws | None:
        """The part of the target's draws that a draft can know, under rules that follow these."""
        if self.run.random is None or not self.verifier.follows:
            return None
        keys = self.run.random.ahead(max(1, budget.levels))
        return NextDraws(keys, self.settings(self.run.draft_sampling))

    def verify(self, tree: TokenTree) -> TargetOutput:
        """One pass of the target over all nodes of a tree."""
        assert self.cache.lengths is not None
        # Positions follow depth, not the place in the tree: siblings share one, in other columns.
        positions = self.target.legal_positions(self.cache.lengths[:, None] + tree.depths)
        mask = self.target.tree_mask(self.cache, tree.ancestors)
        tokens = tree.tokens.clamp_min(0)  # padding nodes are computed and never accepted
        return self.target.run(tokens, positions, mask, self.features, self.cache)

    def commit(
        self, session: DraftSession, launched: Launched, path: torch.Tensor | None, longest: int
    ) -> None:
        """Keep the accepted path [B, P] of a step, None where it lies in place: no row is longer
        than `longest` then. The token after it is the next root.
        """
        self.cache.commit(path, launched.result.committed, longest)
        # After the cache: drafters with the target's own layers read it as it is now.
        committed = launched.committed(self.cache)
        self.roots = committed.ends.roots
        session.commit(committed)

    def keep_active(self, session: DraftSession) -> None:
        """Take rows that have ended out of the running batch, once many are idle.

        Where passes are recorded a power of two stays. Idle rows that have become longer than all
        others go on as copies of the shortest of these.
        """
        places = self.run.drop_idle(self.target.memory.size)
        if places is None:
            active = [row.active for row in self.run.running_rows()]
            places = shortened(self.lengths, active)
        if places is not None:
            self.ahead = None  # the next step is another one, or there is none
            if places:
                self._go_on_with(places, session)

    def fill_up(self, session: DraftSession) -> None:
        """Let rows that have ended make the batch a power of two.

        Where steps are recorded each number of rows would ask for recordings of its own.
        """
        rows = len(self.lengths)
        missing = self.target.memory.size(rows) - rows
        if not missing or not self.in_one_call:
            return
        places = [*range(rows), *[min(range(rows), key=self.lengths.__getitem__)] * missing]
        self.run.add_idle(places[rows:])
        self._go_on_with(places, session)

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
        self.lengths = joined([self.lengths, other.lengths], order)
        self.cache.join_rows(other.cache, order, max(self.lengths))
        self.roots = joined([self.roots, other.roots], order)
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
