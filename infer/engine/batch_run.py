"""One batch on its way from prompts to answers; shared by every way of decoding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers.generation.logits_process import LogitsProcessorList

from drafthead.heads.drafting.drafter import Committed, DraftSession, Ends, at_last
from drafthead.heads.sampling import RowRandom, SamplingConfig, probabilities, sample
from drafthead.heads.target.features import FeatureSpec
from drafthead.heads.target.target import Target, TargetOutput
from drafthead.heads.trees.recipe import TreeRecipe
from drafthead.heads.trees.tree import TokenTree
from drafthead.infer.engine.compiled_target import CompiledTarget, new_cache
from drafthead.infer.engine.graph_step import Draws
from drafthead.infer.engine.logits_processing import PathProcessing
from drafthead.infer.engine.outcome import Outcome, accept, in_one_table, to_host
from drafthead.infer.engine.results import DecodeStats
from drafthead.infer.engine.rows import Batch
from drafthead.infer.request.stopping import Stop
from drafthead.infer.verifiers import Verifier

# Columns that the cache has at first for new tokens; it grows when an answer is longer.
FIRST_ROOM = 512

Emitted = dict[int, list[int]]  # row number -> the tokens that it has just gained


@dataclass(frozen=True)
class Request:
    """What to decode, and how."""

    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]  # most new tokens, for each prompt
    sampling: SamplingConfig
    seeds: Sequence[int]  # one for each prompt
    end_ids: frozenset[int]
    processors: Sequence[LogitsProcessorList] = ()  # one for each prompt, or none at all
    stops: Sequence[Stop] = ()  # one for each prompt, or none at all
    draft_temperature: float | None = None  # at which children are drawn; None: as the target's

    @property
    def draft_sampling(self) -> SamplingConfig:
        """How the draft's logits become the distribution that children are drawn from.

        Any distribution that is known before the draw keeps the output exact.
        """
        if self.draft_temperature is None or self.sampling.greedy:
            return self.sampling
        return replace(self.sampling, temperature=self.draft_temperature)


class BatchRun:
    """The state of a batch: its cache, what each row has said, and the last token of each."""

    def __init__(self, target: Target, request: Request, features: FeatureSpec, max_nodes: int):
        """`max_nodes` is the most nodes that one pass will have."""
        self.target, self.request = target, request
        self.features = features.with_last()  # so that plain steps and trees share compiled passes
        self.max_nodes = max_nodes
        self.cache = new_cache(target)
        self.batch = Batch(request.limits, request.end_ids, request.stops)
        self.stats = DecodeStats(
            accept_lengths=[row.accept_lengths for row in self.batch.rows],
            decoded_tokens=[0] * len(request.prompts),
        )
        self.random = None if request.sampling.greedy else RowRandom(request.seeds, target.device)
        self.temperature = torch.tensor(float(request.sampling.temperature), device=target.device)
        self.prompt_ids, self.prompt_lengths = padded(request.prompts, target.device)
        self.lengths = [len(prompt) for prompt in request.prompts]  # committed, by running place
        self.roots = self.prompt_ids[:, 0]  # [B] last committed tokens; set by the prompt pass
        self.last_lengths: list[int] = []  # tokens that the last step committed in active rows
        self.processing: PathProcessing | None = None
        if request.processors:
            self.processing = PathProcessing(
                request.processors, request.prompts, self.batch, request.sampling.greedy
            )
        # The target, if it says tokens by its logits as they are and has that as a graph.
        simple = request.sampling.whole and self.processing is None
        self.graphs = target if simple and isinstance(target, CompiledTarget) else None

    def prefill(self) -> tuple[Committed, Emitted]:
        """The pass over the prompts, which also gives each row its first token.

        Padding stands to the right, where a causal mask never looks, so the model builds its own.
        """
        ids, lengths = self.prompt_ids, self.prompt_lengths
        longest = ids.shape[1]
        positions = torch.arange(longest, device=ids.device).expand_as(ids)
        rows = torch.arange(ids.shape[0], device=ids.device)
        output = self.target.run(
            ids,
            positions,
            None,
            self.features,
            self.cache,
            logits_to_keep=1,
        )
        assert output.features.last is not None
        # The last positions differ from row to row, so their logits are computed on their own.
        hidden = at_last(output.features.last, lengths)
        logits = self.target.project(hidden)
        room = min(max(self.request.limits), FIRST_ROOM) + self.max_nodes
        self.cache.commit_prompt(lengths, longest, room)
        self.roots = self.pick(logits)
        following = torch.cat([ids[:, 1:], self.roots[:, None]], dim=1)
        following[rows, lengths - 1] = self.roots
        emitted = self.batch.take([[token] for token in self.roots.tolist()])
        ends = Ends(self.roots, hidden)
        return Committed(following, output.features, lengths, known_ends=ends), emitted

    def pick(self, logits: torch.Tensor) -> torch.Tensor:
        """The next token [B] of logits [B, V]: the most probable one, or a drawn one."""
        if self.processing is not None:
            logits = self.processing.after_rows(logits)
        if self.random is None:
            return logits.float().argmax(-1)
        self.begin_random_step()
        return sample(probabilities(logits, self.request.sampling), self.random.ahead(1)[:, 0])

    def begin_random_step(self) -> None:
        """Start each running row's random stream for its next token."""
        if self.random is not None:
            self.random.begin_step([len(row.tokens) for row in self.batch.running_rows()])

    def verify(self, tree: TokenTree) -> TargetOutput:
        """One pass of the target over all nodes of a tree."""
        assert self.cache.lengths is not None
        positions = self.legal(self.cache.lengths[:, None] + tree.depths)
        mask = self.cache.mask(tree.ancestors, self.target.dtype)
        tokens = tree.tokens.clamp_min(0)  # padding nodes are computed and never accepted
        return self.target.run(tokens, positions, mask, self.features, self.cache)

    def graphs_of(self, verifier: Verifier) -> CompiledTarget | None:
        """The target, if a step under the rule is one graph of it."""
        return self.graphs if verifier.follows else None

    def judge(self, drafted: TokenTree | TreeRecipe, verifier: Verifier) -> Outcome:
        """Verify a tree and apply a rule to what the target says; outlines are for graphs alone."""
        graphs = self.graphs_of(verifier)
        if graphs is None:
            assert isinstance(drafted, TokenTree)
            return self.judge_known(drafted, verifier)
        recipe = drafted if isinstance(drafted, TreeRecipe) else TreeRecipe.of(drafted)
        with self.stats.phase("verify"):
            draws = self.draws(recipe.max_depth)
            return graphs.step(recipe, self.features, self.cache, draws)

    def judge_known(self, tree: TokenTree, verifier: Verifier) -> Outcome:
        """`judge` step by step, for trees whose tokens are known."""
        with self.stats.phase("verify"):
            output = self.verify(tree)
        with self.stats.phase("accept"):
            logits = output.logits
            if self.processing is not None:
                logits = self.processing.after_nodes(tree, logits)
            acceptance, tokens = accept(verifier, tree, logits, self.request.sampling, self.random)
            answers, paths = to_host(in_one_table(tokens, acceptance))
            rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
            features = output.features.map(lambda hidden: hidden[rows, acceptance.path])
            in_place = len(paths) == 1 and paths[0] == list(range(len(paths[0])))
            assert self.cache.lengths is not None
            lengths = self.cache.lengths + acceptance.length
            return Outcome(acceptance, tokens, features, answers, lengths, in_place)

    def commit(self, outcome: Outcome) -> None:
        """Keep the accepted path in the cache; its last token is the next root."""
        both = zip(self.lengths, outcome.answers, strict=True)
        self.lengths = [old + len(new) for old, new in both]
        path = None if outcome.in_place else outcome.acceptance.path[:, : outcome.width]
        self.cache.commit(path, outcome.lengths, max(self.lengths))
        self.roots = outcome.acceptance.bonus

    def draws(self, depth: int) -> Draws | None:
        """What the target draws its own tokens of a tree with, the same as in plain decoding."""
        if self.random is None:
            return None
        return Draws(self.temperature, self.random.ahead(depth + 1))

    def legal(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions within the context: what lies past its end is never kept, but is computed."""
        if self.target.max_length is None:
            return positions
        return positions.clamp_max(self.target.max_length - 1)

    def take_step(self, answers: list[list[int]]) -> Emitted:
        """Give the running rows what a step committed; returns what they kept of it."""
        both = zip(self.batch.running_rows(), answers, strict=True)
        self.last_lengths = [len(answer) for row, answer in both if row.active]
        emitted = self.batch.take_step(answers)
        for number, tokens in emitted.items():
            self.stats.decoded_tokens[number] += len(tokens)
        return emitted

    def keep_active(self, session: DraftSession | None = None) -> None:
        """Take rows that have ended out of the running batch, many at a time."""
        places = self.batch.drop_idle()
        if not places:
            return
        self.lengths = [self.lengths[place] for place in places]
        rows = torch.tensor(places, device=self.target.device)
        self.roots = self.roots[rows]
        self.cache.keep_rows(rows, max(self.lengths))
        if self.random is not None:
            self.random.keep_rows(places)
        if session is not None:
            session.keep_rows(rows)


def padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts as right-padded ids [B, T] and their lengths [B]."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
    return ids.to(device), torch.tensor([len(prompt) for prompt in prompts], device=device)
