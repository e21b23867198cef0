"""Races of all ways of decoding: who takes part, and the run."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from drafthead.core.drafting.drafter import Drafter
from drafthead.core.errors import UserError
from drafthead.core.sampling import SamplingConfig
from drafthead.core.target.weights_hash import weights_fingerprint
from drafthead.infer import Decoder, Target
from drafthead.infer.decoder import decoder_for
from drafthead.infer.drafters.draft_model import same_tokenizer
from drafthead.infer.drafters.lookup import Lookup, PromptLookup
from drafthead.infer.drafters.model_drafter import load_draft_model, model_drafter
from drafthead.infer.drafters.store_lookup import StoreLookup
from drafthead.infer.drafters.with_lookup import WithLookup
from drafthead.infer.loading.loaded import Fitting, NamedDraft
from drafthead.lab.races.comparison import ComparisonRow, divergences, rows_of
from drafthead.lab.races.contestants import Ours, Transformers, changeable
from drafthead.lab.races.divergence import Divergence
from drafthead.lab.races.race import (
    GENERATE,
    PLAIN,
    Contestant,
    UnfinishedRace,
    in_batches,
    prepare,
    race,
)
from drafthead.lab.races.record import Prompt
from drafthead.lab.races.terms import RaceTerms

logger = logging.getLogger(__name__)

LOOKUP = "lookup"
GREEDY = SamplingConfig()


@dataclass(frozen=True)
class DraftOptions:
    """Options of all drafters: how much is drafted, and whether layers are compiled."""

    draft_tokens: int  # most tokens of a draft model, own layers and lookup
    tree_nodes: int | None  # the root included; None: planned by cost
    compile: bool | None  # see `prepared_target`
    dtype: str = "auto"  # of draft models


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
            Transformers(theirs, "model", sampling, self.target, assistant),
            Transformers(f"{theirs}, {chain}", "model", sampling, self.target, assistant, chain),
        ]


def entrants(target: Target, drafts: Mapping[str, NamedDraft], options: DraftOptions) -> Entrants:
    """Load drafters, named by their modes, and what else takes part in a race.

    Each drafter is raced alone, with lookup beside it, and with each table of n-grams beside it;
    lookup and tables are raced alone as well. Raises UserError for what cannot be loaded, and for
    `answers`, whose later rounds would know those of the first.
    """
    if any(named.name == "answers" for named in drafts.values()):
        raise UserError(
            "compare cannot draft from answers, because its rounds repeat: leave it out"
        )
    # Plain decoding comes first: what is recorded of the target serves all others.
    plain = decoder_for(target, None, None, options.compile)
    ours = plain.target  # recorded passes belong to it; transformers knows none
    # As the target is: recorded, with our kernels, or for False as the model is written.
    size, compile = options.tree_nodes, ours.backend.records or options.compile
    made: dict[str, Drafter] = {}
    assistant = None
    for mode, named in drafts.items():
        if named.name == "model":  # transformers decodes with the first one, too
            model = load_draft_model(named.argument, target, options.dtype)
            assistant = assistant or model
            made[mode] = model_drafter(model, ours, options.draft_tokens)
        elif named.name != LOOKUP:
            made[mode] = named.kind.make(named.argument, Fitting(ours, options.draft_tokens))
    tables = {mode: each for mode, each in made.items() if isinstance(each, StoreLookup)}
    found = [Ours(PLAIN, "none", GREEDY, plain)]
    for mode, drafter in {**made, LOOKUP: PromptLookup(options.draft_tokens)}.items():
        found.append(Ours(mode, mode, GREEDY, decoder_for(ours, drafter, size, compile)))
        if not isinstance(drafter, Lookup):
            for kind, lookup in {LOOKUP: None, **tables}.items():  # the drafter is prepared already
                both = decoder_for(ours, WithLookup(drafter, lookup), size, False)
                found.append(Ours(f"{mode} + {kind}", mode, GREEDY, both))
    return Entrants(target, assistant, options.draft_tokens, found)


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
    batches = in_batches(ids, size)
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
    with tqdm(contestants, desc="timing", unit="way", leave=False) as bar:
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


def begun_race(
    path: Path,
    run: dict[str, object],
    questions: Sequence[Prompt],
    target: Target,
    drafts: Sequence[NamedDraft],
) -> UnfinishedRace:
    """The race that an earlier run has begun, or a new one; a line says if there was one.

    It is the same race if command, machine and versions in `run`, prompts, the target's weights and
    the files of drafters are the same. Drafters on the hub are known by their names alone.
    """
    made_of = {
        **run,
        "prompts": questions,
        "weights": weights_fingerprint(target),
        "files": {str(draft): states(Path(draft.argument)) for draft in drafts if draft.argument},
    }
    race = UnfinishedRace(path, made_of)
    if race.begun and race.changed:
        print(f"{path} is of another race (not the same: {', '.join(race.changed)}): begins again")
    elif race.batches:
        print(f"{path}: goes on after {len(race.batches)} batches of prompts, which are kept")
    return race


def states(path: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of a file or of the files in a folder; none of what is not here."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path] * path.is_file()
    found = [(file.relative_to(path).as_posix(), file.stat()) for file in files if file.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]
