"""Races of all ways of decoding, for compare and leaderboard: who takes part, and the run."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tqdm import tqdm

from drafthead.contrib.own_layers.own_layers import OwnLayers
from drafthead.heads.drafting.drafter import Drafter
from drafthead.heads.errors import UserError
from drafthead.heads.formats.checkpoint import load_head
from drafthead.heads.sampling import SamplingConfig
from drafthead.heads.target.target import Target
from drafthead.infer.decoder import Decoder, decoder_for
from drafthead.infer.drafters.draft_model import same_tokenizer
from drafthead.infer.drafters.level_drafter import LevelDrafter
from drafthead.infer.drafters.model_drafter import model_drafter
from drafthead.infer.drafters.prompt_lookup import PromptLookup
from drafthead.infer.drafters.store_lookup import StoreLookup
from drafthead.infer.drafters.with_lookup import WithLookup
from drafthead.infer.loaded import head_drafter
from drafthead.lab.races.comparison import (
    GENERATE,
    PLAIN,
    ComparisonRow,
    divergences,
    rows_of,
)
from drafthead.lab.races.contestants import Contestant, Ours, Transformers, changeable
from drafthead.lab.races.divergence import Divergence
from drafthead.lab.races.race import prepare, race
from drafthead.lab.races.record import Prompt
from drafthead.lab.races.unfinished_race import UnfinishedRace

logger = logging.getLogger(__name__)

# Modes that are not heads.
LOOKUP, DATASTORE, DRAFT_MODEL = "prompt lookup", "datastore", "draft model"
OWN_LAYERS = "own layers"


@dataclass(frozen=True)
class RaceTerms:
    """What everybody decodes, and how often."""

    temperatures: tuple[float, ...] = (0.0,)  # 0 is greedy
    max_new_tokens: int = 128
    rounds: int = 3
    verifier: str = "auto"
    seed: int = 0
    batch_size: int = 1  # prompts that are decoded together
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.rounds < 1 or not self.temperatures:
            raise UserError(
                "a race needs a temperature and at least 1 round, got "
                f"{list(self.temperatures)} and {self.rounds}"
            )


class Drafters:
    """Everything that takes part, loaded once."""

    def __init__(
        self,
        target: Target,
        heads: Sequence[Path],
        assistant: Target | None,
        draft_tokens: int,
        tree_nodes: Sequence[int | None],
        compile: bool,
        with_lookup: bool = False,
        stored: StoreLookup | None = None,
        own_layers: Sequence[int] = (),
    ):
        """transformers' own decoding runs on `target`; `assistant` is a draft model, and
        `own_layers` are those of the target that draft.

        Heads draft trees of each size in `tree_nodes`, where None is planned by cost; all others
        have the first size. With `with_lookup` all that draft with a model also take part with
        lookup beside them: prompt lookup, and if there is something `stored`, lookup in that.
        """
        self.target, self.assistant, self.draft_tokens = target, assistant, draft_tokens
        first = tree_nodes[0]
        self.plain = decoder_for(target, None, None, compile)
        ours = self.plain.target
        self.lookup = decoder_for(ours, PromptLookup(draft_tokens), first, compile)
        self.stored = None if stored is None else decoder_for(ours, stored, first, compile)

        def beside(drafter: Drafter, mode: str) -> list[tuple[str, Decoder]]:
            """Modes and decoders of a drafter with lookup beside it; it is compiled already."""
            lookups = {"lookup": None, **({} if stored is None else {"datastore": stored})}
            return [
                (f"{mode} + {name}", decoder_for(ours, WithLookup(drafter, lookup), first, False))
                for name, lookup in lookups.items()
                if with_lookup
            ]

        by_levels: dict[str, LevelDrafter] = {}
        if assistant is not None:
            by_levels[DRAFT_MODEL] = model_drafter(assistant, ours, draft_tokens)
        if own_layers:
            by_levels[OWN_LAYERS] = OwnLayers(ours, own_layers, draft_tokens)
        self.is_chain = first is not None and first <= draft_tokens + 1  # theirs, alone
        self.drafts: list[tuple[str, str, Decoder]] = []  # mode, name, decoder
        for name, drafter in by_levels.items():
            self.drafts.append((name, name, decoder_for(ours, drafter, first, compile)))
            self.drafts += [(mode, name, decoder) for mode, decoder in beside(drafter, name)]
        self.heads: list[tuple[str, str, Decoder]] = []  # mode, name, decoder
        for folder in heads:
            head = head_drafter(load_head(folder, ours), ours)
            for number, size in enumerate(tree_nodes):
                decoder = decoder_for(ours, head, size, compile and number == 0)
                mode = f"head {folder.name}" + (f", {size or 'planned'}" if number else "")
                self.heads.append((mode, folder.name, decoder))
            both = beside(head, f"head {folder.name}")
            self.heads += [(mode, folder.name, decoder) for mode, decoder in both]

    def contestants(
        self, sampling: SamplingConfig, verifier: str, assisted: bool
    ) -> list[Contestant]:
        """The race at one temperature, baselines first; `assisted` adds transformers' assistant,
        which takes one prompt at a time.
        """
        contestants: list[Contestant] = [
            Ours(PLAIN, "none", sampling, self.plain),
            Transformers(GENERATE, "none", sampling, self.target),
        ]
        if self.assistant is not None and assisted:
            contestants += self._assisted(self.assistant, sampling)
        for mode, name, decoder in self.drafts:
            chain = self.is_chain and mode == name
            contestants.append(
                Ours(mode, name, sampling, decoder, verifier=verifier, is_chain=chain)
            )
        contestants.append(Ours(LOOKUP, LOOKUP, sampling, self.lookup, verifier=verifier))
        if self.stored is not None:
            kind = DATASTORE
            contestants.append(Ours(kind, kind, sampling, self.stored, verifier=verifier))
        contestants += [
            Ours(mode, name, sampling, decoder, verifier=verifier)
            for mode, name, decoder in self.heads
        ]
        return contestants

    def _assisted(self, assistant: Target, sampling: SamplingConfig) -> list[Contestant]:
        """transformers' assisted generation, with its own schedule and with our length."""
        if not sampling.greedy and not same_tokenizer(self.target, assistant):
            assistant = self.changeable_assistant
        chain, kind = self.draft_tokens, DRAFT_MODEL
        theirs = "generate + assistant"
        return [
            Transformers(theirs, kind, sampling, self.target, assistant),
            Transformers(f"{theirs}, {chain}", kind, sampling, self.target, assistant, chain),
        ]

    @cached_property
    def changeable_assistant(self) -> Target:
        """The assistant for transformers' sampling with another tokenizer; one for all races."""
        assert self.assistant is not None
        return changeable(self.assistant)


def run_races(
    drafters: Drafters,
    prompts: Sequence[Prompt],
    terms: RaceTerms,
    assisted: bool,
    unfinished: UnfinishedRace | None = None,
) -> tuple[list[ComparisonRow], list[Divergence]]:
    """One race per temperature: all rows, and where greedy answers differ from plain decoding.

    Categories of prompts are told apart where these are decoded one by one. `unfinished` keeps what
    was decoded, and has what was before a stop.
    """
    ids, size = [p.ids for p in prompts], terms.batch_size
    batches = [ids[start : start + size] for start in range(0, len(ids), size)]
    categories = [p.category for p in prompts] if size == 1 else []
    rows: list[ComparisonRow] = []
    differing: list[Divergence] = []
    for temperature in terms.temperatures:
        sampling = SamplingConfig(temperature=temperature, top_p=terms.top_p)
        contestants = drafters.contestants(sampling, terms.verifier, assisted and size == 1)
        contestants = ready(contestants, batches[0], terms)
        total = terms.rounds * len(prompts) * len(contestants)
        with tqdm(total=total, desc=f"temperature {temperature:g}", unit="answer") as bar:
            records = race(
                contestants, batches, terms.rounds, terms.max_new_tokens, terms.seed, bar.update,
                unfinished,
            )  # fmt: skip
        rows += rows_of(records, temperature, drafters.plain.end_ids, categories)
        if temperature == 0:
            differing += divergences(records, ids, drafters.target)
    return rows, differing


def ready(
    contestants: Sequence[Contestant], prompts: Sequence[list[int]], terms: RaceTerms
) -> list[Contestant]:
    """The contestants, prepared; without transformers' assistant where that cannot decode.

    transformers refuses an assistant with another tokenizer and as many tokens as the target, and
    fails above temperature 0 where all of its tokens are the target's as well.
    """
    taking_part: list[Contestant] = []
    with tqdm(contestants, desc="compiling and timing", unit="way", leave=False) as bar:
        for contestant in bar:
            bar.set_postfix_str(contestant.mode)
            try:
                prepare(contestant, prompts, terms.max_new_tokens, terms.seed)
                taking_part.append(contestant)
            except (AttributeError, IndexError, RuntimeError, ValueError) as error:
                if not (isinstance(contestant, Transformers) and contestant.assistant):
                    raise
                logger.warning(
                    "%s does not take part, as transformers cannot decode with this draft model: "
                    "%s",
                    contestant.mode,
                    error,
                )
    return taking_part
