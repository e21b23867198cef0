"""Races of all ways of decoding: who takes part, and the run."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from drafthead.contrib.own_layers.own_layers import OwnLayers
from drafthead.heads.drafting.drafter import Drafter
from drafthead.heads.errors import UserError
from drafthead.heads.formats.loading import load_head
from drafthead.heads.sampling import SamplingConfig
from drafthead.heads.target.target import Target
from drafthead.infer.decoder import Decoder, decoder_for
from drafthead.infer.drafters.draft_model import same_tokenizer
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.drafters.model_drafter import model_drafter
from drafthead.infer.drafters.store_lookup import StoreLookup
from drafthead.infer.drafters.with_lookup import WithLookup
from drafthead.infer.loaded import head_drafter, named_draft
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
GREEDY = SamplingConfig()
KINDS = {"head", "model", "layers", "ngrams", "lookup"}  # of drafters that can be raced


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


@dataclass(frozen=True)
class DraftOptions:
    """How much is drafted, by all, and whether passes are compiled."""

    draft_tokens: int  # most tokens of a draft model, own layers and lookup
    tree_nodes: int | None  # the root included; None: planned by cost
    compile: bool


class NamedDrafter(NamedTuple):
    """A drafter with the mode under which it is raced, and its own name."""

    mode: str
    name: str
    drafter: Drafter


@dataclass(frozen=True)
class Entrants:
    """Everything that takes part, loaded once: our ways of decoding, and transformers' models."""

    target: Target  # as it was loaded: transformers' own decoding runs on it
    assistant: Target | None
    draft_tokens: int  # of a draft model, at most
    ours: Sequence[Ours]  # plain decoding first; greedy until a race says otherwise

    @property
    def plain(self) -> Decoder:
        """Plain decoding."""
        return self.ours[0].decoder

    def at(self, sampling: SamplingConfig, verifier: str, assisted: bool) -> list[Contestant]:
        """The contestants of a race at one temperature, the baselines first.

        `assisted` adds transformers' assistant, which takes one prompt at a time.
        """
        plain, *drafting = self.ours
        contestants: list[Contestant] = [
            replace(plain, sampling=sampling),
            Transformers(GENERATE, "none", sampling, self.target),
        ]
        if self.assistant is not None and assisted:
            contestants += self._assisted(self.assistant, sampling)
        return contestants + [
            replace(each, sampling=sampling, verifier=verifier) for each in drafting
        ]

    def _assisted(self, assistant: Target, sampling: SamplingConfig) -> list[Contestant]:
        """transformers' assisted generation, with its own schedule and with our length."""
        if not sampling.greedy and not same_tokenizer(self.target, assistant):
            assistant = changeable(assistant)
        chain, theirs = self.draft_tokens, "generate + assistant"
        return [
            Transformers(theirs, DRAFT_MODEL, sampling, self.target, assistant),
            Transformers(
                f"{theirs}, {chain}", DRAFT_MODEL, sampling, self.target, assistant, chain
            ),
        ]


def entrants(
    target: Target,
    heads: Sequence[Path],
    assistant: Target | None,
    own_layers: Sequence[int],  # of the target, that draft
    stored: StoreLookup | None,
    options: DraftOptions,
) -> Entrants:
    """Load heads, and name all that takes part in a race.

    Each drafter is raced alone and with lookup beside it; lookup is raced alone as well.
    """
    chain, size = options.draft_tokens, options.tree_nodes
    # Plain decoding comes first: what it compiles of the target serves all others.
    plain = decoder_for(target, None, None, options.compile)
    ours = plain.target  # compiled passes belong to it; transformers knows none
    drafters = []
    if assistant is not None:
        drafts = model_drafter(assistant, ours, chain)
        drafters.append(NamedDrafter(DRAFT_MODEL, DRAFT_MODEL, drafts))
    if own_layers:
        drafters.append(NamedDrafter(OWN_LAYERS, OWN_LAYERS, OwnLayers(ours, own_layers, chain)))
    for folder in heads:
        head = head_drafter(load_head(folder, ours), ours)
        drafters.append(NamedDrafter(f"head {folder.name}", folder.name, head))
    lookups: dict[str, StoreLookup | None] = {"lookup": None}
    lookups |= {} if stored is None else {"datastore": stored}
    found = [Ours(PLAIN, "none", GREEDY, plain)]
    for mode, name, drafter in drafters:
        alone = decoder_for(ours, drafter, size, options.compile)
        found.append(Ours(mode, name, GREEDY, alone))
        for kind, lookup in lookups.items():  # the drafter is compiled already
            both = decoder_for(ours, WithLookup(drafter, lookup), size, False)
            found.append(Ours(f"{mode} + {kind}", name, GREEDY, both))
    by_lookup = {LOOKUP: PromptLookup(chain)} | ({} if stored is None else {DATASTORE: stored})
    for mode, drafter in by_lookup.items():
        alone = decoder_for(ours, drafter, size, options.compile)
        found.append(Ours(mode, mode, GREEDY, alone))
    return Entrants(target, assistant, chain, found)


def run_races(
    racers: Entrants,
    prompts: Sequence[Prompt],
    terms: RaceTerms,
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
        contestants = racers.at(sampling, terms.verifier, assisted=size == 1)
        contestants = ready(contestants, batches[0], terms)
        records = race(
            contestants, batches, terms.rounds, terms.max_new_tokens, terms.seed, unfinished
        )
        rows += rows_of(records, temperature, racers.plain.end_ids, categories)
        if temperature == 0:
            differing += divergences(records, ids, racers.target)
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


def by_kind(drafts: Sequence[str]) -> dict[str, list[str]]:
    """What is named of each kind of drafter; raises UserError for a kind that cannot be raced."""
    named: dict[str, list[str]] = {}
    for draft in map(named_draft, drafts):
        named.setdefault(draft.name, []).append(draft.argument)
    if other := sorted(named.keys() - KINDS):
        raise UserError(f"{other[0]} does not take part in a race: leave it out")
    return named


def the_only(named: Mapping[str, Sequence[str]], kind: str) -> str | None:
    """The drafter of a kind, if there is one; raises UserError for several."""
    several = named.get(kind, ())
    if len(several) > 1:
        raise UserError(f"{' and '.join(several)} are two drafters of the kind {kind}: name one")
    return several[0] if several else None
