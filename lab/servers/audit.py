"""Does a server write the target's own text? Asked from outside, over OpenAI's protocol.

The target is loaded here and reads the server's answers: each token should be its own choice, up to
rounding; sampled tokens should follow its law; log-probabilities should be its own.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.core.errors import UserError
from drafthead.core.sampling import SamplingConfig
from drafthead.infer import Target
from drafthead.infer.loading.loaded import named_draft
from drafthead.infer.request.generation_config import listed, own_settings
from drafthead.infer.request.prompts import encode_one
from drafthead.lab.diagnosis.findings import Checks, Finding
from drafthead.lab.exactness.goodness_of_fit import chance_of_worse, detectable
from drafthead.lab.exactness.target_law import LENGTH, TargetLaw, Text
from drafthead.lab.races.divergence import first_difference, rounding_step
from drafthead.lab.races.record import QUESTIONS
from drafthead.lab.servers.asked import AskedServer, DraftCounters, Reply
from drafthead.train.distillation.connection import PENALTY

# Logits that so many rounding steps of bfloat16 are apart count as a tie: servers compute in 16
# bits, in passes of other shapes than ours. Where activations are quantised, too, a tie is wider.
TIE_STEPS, WIDEST_TIE = 4, 1.0
WRONG_SHARE = 0.3  # of tokens: then it is another model or another text, not a fault at some tokens
FALSE_ALARM = 1e-3  # of the test of sampled tokens
LOGPROB_ERROR = 0.25  # nats on average
COMPARED = ("head", "model", "lookup", "ngrams")  # kinds of drafters
TEMPERATURES = torch.linspace(0.3, 2.0, 69)


@dataclass(frozen=True)
class Read:
    """A target's reading of an answer of T tokens after a prompt."""

    reply: Reply
    best: torch.Tensor  # [T] its own choices
    below: torch.Tensor  # [T] by how much the logits of the answer's tokens lie below those
    tie: torch.Tensor  # [T] differences that rounding explains
    logprobs: torch.Tensor  # [T] its log-probabilities of the answer's tokens

    def both_logprobs(self) -> list[tuple[float, float]]:
        """The server's log-probabilities of the tokens beside the target's."""
        return [*zip(self.reply.logprobs or (), self.logprobs.tolist(), strict=False)]

    def wrong(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Places of tokens that it would not have chosen.

        Where the server shows no ids, a text that begins as its own choice does is another
        division of the same text.
        """
        places = (self.below > self.tie).nonzero().flatten().tolist()
        if self.reply.shows_ids:
            return places
        texts = {p: str(tokenizer.decode(self.reply.ids[p:])) for p in places}
        own = {p: str(tokenizer.decode([int(self.best[p])])) for p in places}
        return [place for place in places if not texts[place].startswith(own[place])]


@dataclass
class Audit:
    """A server, the target that it should serve, and what is asked of it."""

    server: AskedServer
    target: Target
    prompts: list[list[int]]
    max_new_tokens: int
    samples: int  # for each of two prompts
    draft: str | None = None  # what the server should draft with, as `named_draft` reads it
    greedy: list[Read] = field(default_factory=list)  # answers to the prompts, once asked
    drafts: DraftCounters | None = None  # of the server for those
    drafts_here: DraftCounters | None = None  # by the same drafter

    def __post_init__(self) -> None:
        """Raises UserError for what is not compared here, before the server is asked anything."""
        kind = None if self.draft is None else named_draft(self.draft).name
        if kind not in (None, *COMPARED):
            raise UserError(
                f"--head {self.draft}: drafts of {', '.join(COMPARED)} are compared with decoding "
                "here; leave it out"
            )

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer."""
        return self.server.tokenizer

    def steps(self, accepted: int) -> int:
        """Steps that wrote the greedy answers after their first tokens, with so many accepted."""
        return sum(len(read.reply.ids) - 1 for read in self.greedy) - accepted

    def asked(self, prompts: list[list[int]]) -> list[Read]:
        """Greedy answers to prompts, as the target sees them."""
        replies = self.server.complete_all(prompts, self.max_new_tokens)
        read = [self.read(p, r) for p, r in zip(prompts, replies, strict=True)]
        errors = torch.tensor([abs(given - own) for r in read for given, own in r.both_logprobs()])
        # Two logits of a server may both be as far off as its log-probabilities are.
        usual = 2 * float(errors.quantile(0.95)) if len(errors) else 0.0
        return [replace(r, tie=r.tie.clamp_min(min(usual, WIDEST_TIE))) for r in read]

    @torch.no_grad()
    def read(self, prompt: list[int], reply: Reply) -> Read:
        """A plain pass of the target over a prompt and an answer.

        Raises UserError for an answer with tokens that the target does not have.
        """
        if max(reply.ids, default=0) >= self.target.vocab_size:
            raise UserError(
                f"the server has answered with token {max(reply.ids)}, and --target has "
                f"{self.target.vocab_size} tokens: name the model that is served"
            )
        ids = torch.tensor([reply.ids], dtype=torch.long, device=self.target.device)
        if not reply.ids:
            nothing = torch.zeros(0)
            return Read(reply, nothing.long(), nothing, nothing, nothing)
        logits = self.target.plain_logits(prompt, ids[:, :-1], ids.shape[1])[0].float()  # [T, V]
        best = logits.max(-1)
        own = logits.gather(1, ids[0, :, None])[:, 0]
        steps = [rounding_step(value, torch.bfloat16) for value in best.values.tolist()]
        return Read(
            reply,
            best.indices.cpu(),
            (best.values - own).cpu(),
            torch.tensor(steps) * TIE_STEPS,
            (own - logits.logsumexp(-1)).cpu(),
        )


CHECKS = Checks[Audit]()
check = CHECKS.add


@check("text at temperature 0")
def greedy_text(audit: Audit) -> Finding | None:
    """Answers to token ids: no template is between the server and the target."""
    before = audit.server.counted()
    audit.greedy = audit.asked(audit.prompts)
    audit.drafts = audit.server.counted().since(before)
    return own_text(audit, audit.greedy)


def own_text(audit: Audit, answers: list[Read]) -> Finding:
    """Tell whether answers are the target's own, and what is likely wrong where they are not."""
    wrong = [(answer, place) for answer in answers for place in answer.wrong(audit.tokenizer)]
    tokens = sum(len(answer.reply.ids) for answer in answers)
    ties = sum(int(((a.below > 0) & (a.below <= a.tie)).sum()) for a in answers)
    evidence = (
        f"{tokens} tokens in {len(answers)} answers: {tokens - len(wrong) - ties} are the target's "
        f"own choice, {ties} are ties that rounding decides, {len(wrong)} are neither"
    )
    if not all(answer.reply.shows_ids for answer in answers):
        evidence += " (texts encoded again: the server shows no token ids)"
    if not tokens:
        return Finding("no answer has a token", "the server is wrong, or ends every answer at once")
    if not wrong:
        return Finding(evidence)
    worst, place = max(wrong, key=lambda one: float(one[0].below[one[1]]))
    evidence += (
        f"; the worst, token {place} of an answer, lies {float(worst.below[place]):.1f} below the "
        f"largest logit: {audit.tokenizer.decode([worst.reply.ids[place]])!r} in place of "
        f"{audit.tokenizer.decode([int(worst.best[place])])!r}"
    )
    own = own_settings(audit.target.model.generation_config)
    own.pop(PENALTY, None)  # which no request leaves on
    cause = likely_cause(wrong, tokens)
    if own:
        cause = f"what its generation config says may be applied ({listed(own)}); else {cause}"
    return Finding(evidence, cause)


def likely_cause(wrong: list[tuple[Read, int]], tokens: int) -> str:
    """Say why tokens may be wrong."""
    shifts = Counter(answer.reply.ids[place] - int(answer.best[place]) for answer, place in wrong)
    shift, times = shifts.most_common(1)[0]
    if len(wrong) > 3 and times > len(wrong) / 2:
        return (
            f"{times} ids are the right ones {shift:+d}: the vocabulary has an offset, as where "
            "d2t is taken for ids or the other way round"
        )
    if len(wrong) > WRONG_SHARE * tokens:
        return "another model, other weights, or a quantisation that changes it: compare --target"
    return (
        "single tokens are not the target's: drafts are accepted that it would not choose, or the "
        "cache keeps refused ones. Switch drafting off in the server, and audit it again"
    )


@check("identifiers that are copied")
def identifiers(audit: Audit) -> Finding | None:
    """Rare names that stand twice in the prompt, a third time in the answer.

    Drafts of copies are long and almost always accepted, so faults of acceptance show first here.
    """
    letters = torch.randint(0, 26, (3, 8, 6), generator=torch.Generator().manual_seed(0))
    prompts = []
    for names in letters.tolist():
        line = " ".join("".join(chr(97 + n) for n in name) + f"_{name[0]}" for name in names)
        prompts.append(list(audit.tokenizer(f"{line}\n{line}\n")["input_ids"]))
    return own_text(audit, audit.asked(prompts))


@check("chat template")
def chat_template(audit: Audit) -> Finding | None:
    """Tell whether chats are read as the tokenizer here renders them."""
    if not audit.tokenizer.chat_template:
        return None
    reply = audit.server.chat(QUESTIONS[0], audit.max_new_tokens)
    readings = possible_readings(QUESTIONS[0], audit.tokenizer)
    (ours, prompt), *_ = readings.items()
    if reply.prompt_ids is not None:
        return compared_prompts(reply.prompt_ids, readings, audit.tokenizer)
    wrong = {
        name: len(audit.read(ids, reply).wrong(audit.tokenizer)) for name, ids in readings.items()
    }
    best = min(wrong, key=lambda name: wrong[name])
    read = reply.prompt_tokens if reply.prompt_tokens is not None else len(readings[best])
    evidence = (
        f"the server has read {read} tokens, here they are {len(prompt)}; {wrong[ours]} of "
        f"{len(reply.ids)} tokens of its answer are not the target's"
    )
    if wrong[best] < wrong[ours]:
        return Finding(evidence, f"{best}: so read, {wrong[best]} tokens are wrong")
    if read == len(prompt) and not wrong[ours]:
        return Finding(evidence)
    likely = [name for name, ids in readings.items() if len(ids) == read != len(prompt)]
    return Finding(evidence, likely[0] if likely else "another template")


def compared_prompts(
    read: list[int], readings: dict[str, list[int]], tokenizer: PreTrainedTokenizerBase
) -> Finding:
    """The tokens that a server has read, beside the right reading, the first, and others."""
    (ours, prompt), *_ = readings.items()
    evidence = f"the server has read {len(read)} tokens, here they are {len(prompt)}"
    found = next((name for name, ids in readings.items() if ids == read), None)
    if found == ours:
        return Finding(f"{evidence}, the same ones")
    place = first_difference(read, prompt)
    theirs, own = (str(tokenizer.decode(ids[place : place + 8])) for ids in (read, prompt))
    return Finding(
        evidence, found or f"another template: from token {place} on {theirs!r}, here {own!r}"
    )


def possible_readings(question: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """Token ids of a chat, rightly rendered first, and as servers render it wrongly."""
    prompt = encode_one(question, tokenizer)
    found = {"as here": prompt, "no chat template": list(tokenizer(question)["input_ids"])}
    if (begin := tokenizer.bos_token_id) is not None:
        found["BOS twice, by the template and by the tokenizer"] = [begin, *prompt]
        if prompt[0] == begin:
            found["BOS is missing"] = prompt[1:]
    return found


@check("log-probabilities")
def logprobs(audit: Audit) -> Finding | None:
    """Return what the server says of its greedy answers' tokens, beside the target's own."""
    pairs = [pair for answer in audit.greedy for pair in answer.both_logprobs()]
    if not pairs:
        return Finding("the server gives none: not tested")
    given, own = (torch.tensor(each, dtype=torch.float64) for each in zip(*pairs, strict=True))
    error = (given - own).abs().mean()
    evidence = f"of {len(pairs)} tokens they differ from the target's by {error:.3f} on average"
    unsure = own < -0.01  # of which a log-probability of 0 is no rounding
    if int((given[unsure] == 0).sum()) > int(unsure.sum()) / 2:
        return Finding(evidence, "most are 0.0: they are not computed where tokens are drafted")
    if not bool(given.isfinite().all()) or bool((given > 1e-3).any()):
        return Finding(evidence, "some are no logarithms of probabilities")
    far = float(error) > LOGPROB_ERROR
    return Finding(
        evidence, "those of another law, or of other places in the text" if far else None
    )


@check("sampling at temperature 1")
def sampling(audit: Audit) -> Finding | None:
    """The first tokens of short answers: a chi-square test of the target's exact law."""
    fits, seen = [], []
    for prompt in audit.prompts[:2]:
        law = TargetLaw(
            audit.target, prompt, SamplingConfig(1.0), audit.samples, audit.server.end_ids
        )
        replies = audit.server.complete_all([prompt] * audit.samples, LENGTH, temperature=1.0)
        if not all(reply.shows_ids for reply in replies):
            return Finding("not tested: the server shows no token ids")
        fits.append(law.fit_of([reply.ids for reply in replies], is_rounded=True))
        seen += [(law, tuple(reply.ids[:LENGTH])) for reply in replies]
    chance, noticed = chance_of_worse(fits), detectable(fits, FALSE_ALARM, 0.9)
    evidence = (
        f"{sum(each.samples for each in fits)} continuations of {LENGTH} tokens: p-value "
        f"{chance:.2g}; a total variation of {noticed:.2f} would be noticed"
    )
    if chance >= FALSE_ALARM:
        return Finding(evidence)
    return Finding(evidence, other_law(seen))


def other_law(seen: list[tuple[TargetLaw, Text]]) -> str:
    """Return how texts may have been drawn that do not follow their law."""
    # The first token comes from the pass over the prompt, the others from drafting.
    first, later = (likely_temperature(seen, places) for places in ((0,), range(1, LENGTH)))
    if abs(later - 1) > 0.1 >= abs(first - 1) / 2:
        return "the first token follows its law, those that drafting brings do not"
    if abs(later - 1) > 0.1:
        return f"tokens are drawn as at temperature {later:.2f}"
    return "another law: drafts are accepted too readily, or tokens are filtered (top_k, min_p)"


def likely_temperature(seen: list[tuple[TargetLaw, Text]], places: Iterable[int]) -> float:
    """The temperature at which tokens at some places of sampled texts are most likely."""
    total = torch.zeros(len(TEMPERATURES), dtype=torch.float64)
    for law, text in seen:
        for place in places:
            known = law.next_token.get(text[:place])
            if known is not None and place < len(text):
                logits = known.double().clamp_min(1e-30).log()
                total += (logits / TEMPERATURES[:, None]).log_softmax(1)[:, text[place]]
    return float(TEMPERATURES[int(total.argmax())])
