"""Random small configurations of everything that decodes: one seed, one case."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from architectures import ARCHITECTURES, OTHERS
from drafters import FORMS, SMALL_MODELS
from tiny import ENCODER_DECODERS, FORCED, VOCAB

from drafthead.heads.base import HEADS

Pick = TypeVar("Pick")
# How answers are asked for, and how often.
WAYS = {
    "whole": 34, "pieces": 13, "served": 12, "rows": 12, "chat": 10, "remembered": 9, "beams": 8,
    "loop": 4, "http": 2,
}  # fmt: skip
WITH_ENCODER = ("whole", "pieces", "served", "rows", "beams")  # the others are refused
ENCODER_DRAFTERS = ("none", "draft-model", "prompt-lookup", "draft-model+lookup")
LOOKUPS = ("prompt-lookup", "ngrams", "answers")
BYTES = 260  # tokens of `byte_tokenizer`
# Rules by whether they are for temperature 0, and how often.
COLD = {"auto": 4, "greedy": 4, "top_k": 0.8}
WARM = {"auto": 2, "match": 5, "rejection": 2, "traversal": 2, "typical": 0.5, "lenient": 0.5}
LOSSY = ("top_k", "typical", "lenient")


@dataclass(frozen=True)
class Case:
    """A configuration. What is at its default takes no part, and is not shown."""

    seed: int
    way: str = "whole"
    architecture: str = "llama"
    text: str = "words"  # the tokenizer: words or bytes
    drafter: str = "none"
    budget: str | int = "largest"  # of the trees; "planned", or one of the drafter's by number
    rule: str = "auto"
    temperature: float = 0.0
    filters: Mapping[str, float] = field(default_factory=dict)  # top_k, top_p, min_p, typical_p
    processors: Mapping[str, Any] = field(default_factory=dict)  # options of a GenerationConfig
    own: bool = False  # these come from the model's own generation config
    bans: bool = False  # a processor of the caller's, see `Bans`
    criteria: int = 0  # an answer ends where its last two tokens are a multiple of this together
    stops: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()
    prompts: tuple[tuple[int, ...], ...] = ((9,),)
    new: int = 12  # most new tokens
    chunk: int = 0  # tokens of a prompt that a pass reads

    def __str__(self) -> str:
        shown = [f for f in fields(self) if getattr(self, f.name) != default_of(f)]
        return "Case(" + ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in shown) + ")"

    @property
    def vocab(self) -> int:
        """Tokens of the target."""
        return VOCAB if self.text == "words" else BYTES

    @property
    def lossy(self) -> bool:
        """Whether the rule changes the text."""
        return self.rule in LOSSY

    def chance(self, what: str) -> random.Random:
        """Random numbers for a purpose, always the same."""
        return random.Random(f"{self.seed} {what}")


def default_of(one: Any) -> Any:
    """The default of a field of a dataclass."""
    return one.default_factory() if callable(one.default_factory) else one.default


def drawn(seed: int) -> Case:
    """The case of a seed."""
    chance = random.Random(seed)
    way = weighted(chance, WAYS)
    architecture = drawn_architecture(chance, way)
    encodes = architecture in ENCODER_DECODERS
    text = "words" if encodes or chance.random() < 0.7 else "bytes"
    vocab = VOCAB if text == "words" else BYTES
    temperature = 0.0
    if way != "beams" and chance.random() < 0.45:
        temperature = chance.choice([0.3, 0.7, 1.0, 1.5])
    rule = weighted(chance, WARM if temperature else COLD)
    if way in ("beams", "http"):
        rule = "auto"
    ends = drawn_tokens(chance, vocab, chance.choice([0, 1, 1, 3]))
    processors = drawn_processors(chance, vocab, ends, encodes)
    stops = way not in ("beams", "http") and not encodes  # transformers reads a forced token too
    return Case(
        seed=seed, way=way, architecture=architecture, text=text,
        drafter=drawn_drafter(chance, way, encodes),
        budget=chance.choice(["largest", "largest", "planned", 0, 1, 2]),
        rule=rule, temperature=temperature,
        filters=drawn_filters(chance) if temperature else {},
        processors=processors,
        own=not encodes and way != "http" and not ANSWER & {*processors} and chance.random() < 0.15,
        # Of bart they forbid the first token, which is forced: transformers then takes token 0.
        bans=way != "http" and chance.random() < 0.12 and architecture != "bart",
        criteria=chance.choice([7, 11]) if stops and chance.random() < 0.08 else 0,
        stops=drawn_stops(chance) if stops and chance.random() < 0.25 else (),
        ends=ends,
        prompts=drawn_prompts(chance, vocab, 1 if way == "chat" else chance.choice([1, 2, 3])),
        new=chance.choice([1, 4, 8, 14]),
        chunk=chance.choice([1, 3, 8]) if way != "http" and chance.random() < 0.2 else 0,
    )  # fmt: skip


def weighted(chance: random.Random, weights: Mapping[str, float]) -> str:
    """A name, by its weight."""
    return chance.choices([*weights], [*weights.values()])[0]


def drawn_architecture(chance: random.Random, way: str) -> str:
    """Half of the time one with settings of its own; all others that work, and with an encoder."""
    if way in WITH_ENCODER and chance.random() < 0.08:
        return chance.choice([*ENCODER_DECODERS])
    return chance.choice([*(ARCHITECTURES if chance.random() < 0.5 else OTHERS)])


def drawn_drafter(chance: random.Random, way: str, encodes: bool) -> str:
    """A name for `made_drafter`."""
    if encodes:
        return chance.choice(ENCODER_DRAFTERS)
    kinds = {"none": 1, "head": 9, "small": 7, "lookup": 3, "hidden": 2 * (way == "whole")}
    kind = weighted(chance, kinds)
    if kind in ("none", "hidden"):
        return kind
    if kind == "lookup":
        return chance.choice([each for each in LOOKUPS if way != "beams" or each != "answers"])
    head = f"{chance.choice(sorted(HEADS))}:{chance.choice(FORMS)}"
    name = head if kind == "head" else chance.choice(SMALL_MODELS)
    return name + chance.choice(["", "", "", "+lookup", "+store"])


def drawn_tokens(chance: random.Random, vocab: int, count: int) -> tuple[int, ...]:
    """Different tokens that are not special."""
    return tuple(chance.sample(range(5, vocab), count))


def drawn_prompts(chance: random.Random, vocab: int, rows: int) -> tuple[tuple[int, ...], ...]:
    """Texts of 1 to 45 tokens that repeat themselves, some of which begin alike."""
    begin = drawn_tokens(chance, vocab, chance.choice([0, 0, 5, 20]))
    prompts = []
    for _ in range(rows):
        phrase = drawn_tokens(chance, vocab, chance.randint(1, 6))
        rest = drawn_tokens(chance, vocab, chance.randint(0, 6))
        prompts.append((*begin, *(*phrase, *rest, *phrase, *phrase[:2])[: chance.randint(1, 25)]))
    return tuple(prompts)


def drawn_filters(chance: random.Random) -> dict[str, float]:
    """What is sampled from; often from one token alone, where all exact rules agree."""
    every = {
        "top_k": chance.choice([1, 1, 2, 5, 20]), "top_p": chance.choice([0.3, 0.8, 0.95]),
        "min_p": chance.choice([0.05, 0.3]), "typical_p": chance.choice([0.2, 0.9]),
    }  # fmt: skip
    shares = {"top_k": 0.45, "top_p": 0.3, "min_p": 0.15, "typical_p": 0.1}
    return {name: every[name] for name, share in shares.items() if chance.random() < share}


ANSWER = {"frequency_penalty", "presence_penalty"}  # of which transformers knows nothing
COUNTING = {
    "min_new_tokens", "min_length", "forced_eos_token_id", "begin_suppress_tokens",
    "exponential_decay_length_penalty",
}  # fmt: skip


def drawn_processors(
    chance: random.Random, vocab: int, ends: Sequence[int], encodes: bool
) -> dict[str, Any]:
    """Options that become logits processors; in half of the cases none."""
    if chance.random() < 0.5:
        return {}

    def tokens(count: int) -> list[int]:
        return list(drawn_tokens(chance, vocab, count))

    every: dict[str, Any] = {
        "repetition_penalty": chance.choice([0.7, 1.2, 1.8]),
        "frequency_penalty": chance.choice([-1.0, 0.5, 2.0]),
        "presence_penalty": chance.choice([-1.0, 0.5, 2.0]),
        "no_repeat_ngram_size": chance.choice([1, 2, 3]) if vocab > 100 else chance.choice([2, 3]),
        "bad_words_ids": [tokens(1), tokens(1), tokens(2), tokens(3)],
        "suppress_tokens": tokens(chance.choice([1, 10, 40])),
        "begin_suppress_tokens": tokens(20),
        "min_new_tokens": chance.randint(1, 10),
        "min_length": chance.randint(1, 40),
        "sequence_bias": [[tokens(1), 3.0], [tokens(1), -3.0], [tokens(2), 5.0]],
        "forced_eos_token_id": (ends or (9,))[0],
        "exponential_decay_length_penalty": (chance.randint(1, 8), 1.3),
        "renormalize_logits": True,
        "remove_invalid_values": True,
    }
    # transformers refuses to force what is suppressed.
    barred = [every["forced_eos_token_id"], *(FORCED.values() if encodes else ())]
    every["suppress_tokens"] = [t for t in every["suppress_tokens"] if t not in barred] or [8]
    left_out = COUNTING if encodes else set()
    if not ends:
        left_out = left_out | {"min_new_tokens", "min_length", "exponential_decay_length_penalty"}
    names = [name for name in every if name not in left_out]
    return {name: every[name] for name in chance.sample(names, chance.choice([1, 1, 2, 3, 4]))}


def drawn_stops(chance: random.Random) -> tuple[str, ...]:
    """Texts that end an answer, of one to three letters."""
    return tuple(
        "".join(chance.choices("abehtxyzABC ,", k=chance.choice([1, 1, 2, 3])))
        for _ in range(chance.choice([1, 3]))
    )
