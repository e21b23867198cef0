"""The checks of `drafthead head doctor`: each looks for one reason why a head is accepted seldom.

A check is a function of an examination that is registered under its name; it returns what it has
seen, whether that is a fault, and what to do about it.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from drafthead.core.errors import UserError
from drafthead.core.target.weight_types import LOSSY
from drafthead.core.target.weights_hash import weights_fingerprint
from drafthead.heads.layers.draft_vocabulary import DraftVocabulary
from drafthead.infer.answers.results import repeated_ngram_share
from drafthead.infer.decoder import decoder_for
from drafthead.infer.loading.loaded import head_drafter
from drafthead.lab.diagnosis.examination import Authorship, Examination, Patient
from drafthead.lab.diagnosis.findings import Checks, Finding
from drafthead.lab.races.divergence import first_difference
from drafthead.lab.tree_sizes import measured_plan
from drafthead.train.data.conversations import Conversation
from drafthead.train.data.fitted_rows import Reading
from drafthead.train.data.supervision import Rendering, special_ids
from drafthead.train.data.token_table import token_table

# Where a fault begins; what a head has is in the evidence, which the doctor prints of every check.
GREEDY = 0.97  # tokens that the target chooses first; bfloat16 rounds some ties otherwise
SLACK = 0.05  # below the share that sampling from the target gives
MOST_OUTSIDE = 0.10  # tokens outside the draft vocabulary
MOST_CUT = 0.5  # answers without an end
MOST_REPEATED = 0.3  # 8-grams
BETTER_TAPS = 1.05  # gain of accepted tokens, tau - 1, with other taps
LEAST_OTHER = 1.1  # tau with other taps: of a head that guesses nothing either way it says nothing
MOST_LOST = 0.25  # of the accepted tokens that the training's own evaluation had
FEW_TOKENS = 1_000_000  # supervised in training
FALL = 0.6  # of alpha at the depth before

CHECKS = Checks[Examination]()
check = CHECKS.add


@check("answers of another model")
def another_model(seen: Examination) -> Finding:
    """Of its own greedy answers a target chooses every token first, of sampled ones as many as its
    largest probabilities say, of another model's fewer.
    """
    who = seen.authorship
    evidence = (
        f"the target finds {who.first:.1%} of {who.tokens} tokens most probable, and would find "
        f"{who.largest:.1%} so if it had sampled them"
    )
    remedy = "train on the target's own answers, and measure on them: `drafthead data distill`"
    return Finding(evidence, None if is_own(who) else remedy)


def is_own(who: Authorship) -> bool:
    """Whether a target can have written the answers itself, greedily or by sampling."""
    return who.first >= min(GREEDY, who.largest - SLACK)


@check("answers sampled at a temperature")
def sampled(seen: Examination) -> Finding | None:
    """Greedy decoding accepts more than is measured on sampled answers."""
    who = seen.authorship
    if not is_own(who):
        return None
    evidence = f"{who.first:.1%} of the tokens are the target's first choice"
    if who.first >= GREEDY:
        return Finding(f"{evidence}: greedy answers")
    return Finding(
        f"{evidence}, so the answers were sampled",
        "for greedy decoding, measure on greedy answers: `drafthead data distill` without "
        "--temperature",
    )


@check("another chat template")
def other_template(seen: Examination) -> Finding | None:
    """Prompts are to be read as decoding renders them, whatever day the template writes."""
    if not seen.patient.tokenizer.chat_template:
        return None
    asked = [c for c in seen.patient.conversations if c.tokens is not None]
    if not asked:
        return None
    differing = [c for c in asked if first_prompt(c) != rendered_prompt(c, seen)]
    evidence = f"{len(differing)} of {len(asked)} prompts differ from what the template renders"
    if not differing:
        return Finding(evidence)
    found, wanted = first_prompt(differing[0]), rendered_prompt(differing[0], seen)
    place = first_difference(found, wanted)
    here, there = (shown(seen, ids[max(0, place - 2) : place + 4]) for ids in (found, wanted))
    return Finding(
        f"{evidence}; the first from token {place} on: {here} instead of {there}",
        "distil with the tokenizer that decoding uses (doubled beginnings, a missing generation "
        "prompt and thinking tags show here)",
    )


def first_prompt(conversation: Conversation) -> list[int]:
    """The ids of the first prompt that the target was given."""
    assert conversation.tokens is not None
    return conversation.tokens.answers[0].prompt


def rendered_prompt(conversation: Conversation, seen: Examination) -> list[int]:
    """The ids that decoding would give the target for the same messages on the same day."""
    roles = [message["role"] for message in conversation.messages]
    before = conversation.messages[: roles.index("assistant") if "assistant" in roles else None]
    tokenizer, arguments = seen.patient.tokenizer, conversation.template_arguments
    rendering = Rendering(tokenizer, conversation.where, arguments)
    return rendering.dated(before, first_prompt(conversation)).ids(before, True)


def shown(seen: Examination, ids: list[int]) -> str:
    """A few tokens as text."""
    return repr(str(seen.patient.tokenizer.decode(ids, skip_special_tokens=False)))


@check("taps of other layers")
def other_taps(seen: Examination) -> Finding | None:
    """A head that reads the layer beside its own is accepted less often than with its own."""
    if not seen.shifted:
        return None
    own = seen.evaluation.tau_chain
    best = max(seen.shifted, key=lambda shift: seen.shifted[shift].tau_chain)
    other = seen.shifted[best].tau_chain
    layers = list(seen.patient.head.features_needed.layers)
    evidence = f"chains have tau {own:.2f} with taps {layers}, at most {other:.2f} beside them"
    moved = [layer + best for layer in layers]
    remedy = f"set the taps to {moved}: others number layers by their input, we by their output"
    is_better = other > LEAST_OTHER and other - 1 > BETTER_TAPS * (own - 1)
    return Finding(evidence, remedy if is_better else None)


@check("damaged draft vocabulary")
def damaged_vocabulary(seen: Examination) -> Finding | None:
    """The two tables of a draft vocabulary name the same tokens."""
    head = seen.patient.head
    if not isinstance(head, DraftVocabulary) or head.d2t is None or head.t2d is None:
        return None
    size = len(head.t2d)
    ids = torch.arange(len(head.d2t)) + head.d2t.cpu()
    inside = bool(((ids >= 0) & (ids < size)).all())
    same = inside and bool(head.t2d.cpu()[ids].all()) and len(ids.unique()) == int(head.t2d.sum())
    if same:
        return Finding(f"both tables name the same {len(ids)} tokens")
    return Finding(
        "the tables d2t and t2d name different tokens",
        "d2t holds differences, token = guess + d2t[guess]: convert the checkpoint again",
    )


@check("tokens outside the draft vocabulary")
def outside_vocabulary(seen: Examination) -> Finding | None:
    """A token that cannot be guessed ends every draft."""
    head = seen.patient.head
    if not isinstance(head, DraftVocabulary) or head.draft_ids is None:
        return None
    counts = seen.patient.answers.token_counts(seen.patient.target.vocab_size)
    known = torch.zeros(len(counts), dtype=torch.bool)
    ids = head.draft_ids.cpu()
    known[ids[(ids >= 0) & (ids < len(counts))]] = True
    outside = float(counts[~known].sum() / max(1, int(counts.sum())))
    evidence = f"{outside:.1%} of the tokens are not among the {len(ids)} that the head can guess"
    remedy = "train with a larger head.draft_vocab_size, or on answers in the languages of these"
    return Finding(evidence, remedy if outside > MOST_OUTSIDE else None)


@check("answers that were cut")
def cut(seen: Examination) -> Finding:
    """Check for cut answers: what comes late in answers is learnt from whole ones."""
    controls = special_ids(seen.patient.tokenizer)
    lasts = [int(s.input_ids[s.supervised][-1]) for s in seen.patient.answers]
    share = sum(last not in controls for last in lasts) / len(lasts)
    evidence = f"{share:.0%} of {len(lasts)} answers have no end"
    remedy = "give `build` or `data distill` a larger --max-new-tokens, and train with a longer row"
    return Finding(evidence, remedy if share > MOST_CUT else None)


@check("answers that repeat themselves")
def loops(seen: Examination) -> Finding:
    """Loops flatter every drafter, and teach a head little."""
    texts = [s.input_ids[s.supervised].tolist() for s in seen.patient.answers]
    share = repeated_ngram_share(texts)
    evidence = f"{share:.0%} of 8-grams occurred before in the same answer"
    remedy = "add --draft lookup, which drafts loops; `data distill` and `build` end the longest"
    return Finding(evidence, remedy if share > MOST_REPEATED else None)


@check("training data among the answers")
def overlap(seen: Examination) -> Finding | None:
    """Check for training data among the answers: it says nothing about other text."""
    patient = seen.patient
    settings = patient.provenance.get("settings")
    data = settings.get("data", {}) if isinstance(settings, dict) else {}
    sources = [*data["train"]] if isinstance(data.get("train"), dict) else [data.get("train")]
    there = [source for source in sources if source and Path(source).exists()]
    if not there:
        return None
    try:
        tables = [
            token_table(
                Reading(
                    source,
                    data.get("prompt_column"),
                    data["max_length"],
                    None,
                    patient.target.vocab_size,
                    data.get("template_arguments", {}),
                ),
                patient.tokenizer,
            )
            for source in there
        ]
    except UserError as error:
        return Finding(f"the training data cannot be read any more: {error}")
    learnt = np.concatenate([table.digests for table in tables])
    shared = int(np.isin(patient.answers.digests, learnt).sum())
    evidence = f"{shared} of {len(patient.answers)} conversations were trained on"
    remedy = f"measure on others than those of {', '.join(there)}"
    return Finding(evidence, remedy if shared else None)


@check("another target")
def other_target(seen: Examination) -> Finding | None:
    """A head learns one model: its weights, in its number type."""
    patient = seen.patient
    learnt, own = patient.provenance.get("target_weights"), weights_fingerprint(patient.target)
    if learnt == own:
        return Finding("the head was trained for these weights")
    precision = patient.target.precision
    if precision in LOSSY:
        return Finding(
            f"{patient.target_name} is decoded in {precision}, which is another model than the one "
            "in full precision",
            "go on with the training for this model: train.init_from",
        )
    if learnt is None:
        return None
    return Finding(
        f"the head was trained for weights with the hash {learnt}; these have {own}",
        "decode with the model that it was trained for, or adapt it: train.init_from",
    )


@check("too little training, or too much")
def amount_of_training(seen: Examination) -> Finding | None:
    """A head that was better on its own held-out answers lacks data of this kind."""
    provenance, tau = seen.patient.provenance, seen.evaluation.tau_chain
    tokens = provenance.get("supervised_tokens")
    before = (provenance.get("evaluation") or {}).get("tau_chain")
    parts = [f"chains have tau {tau:.2f} here"]
    parts += [f"had {before:.2f} on the training's held-out answers"] if before else []
    parts += [f"{tokens:,} tokens were trained on"] if tokens else []
    evidence = ", ".join(parts)
    if before and tau - 1 < (1 - MOST_LOST) * (before - 1):
        return Finding(
            evidence,
            "these answers are of another kind than the training data: add some of this kind",
        )
    if tokens and tokens < FEW_TOKENS:
        return Finding(
            f"{evidence}; a head can use {FEW_TOKENS:,} and more",
            "train on more answers: train.init_from goes on with this head",
        )
    return Finding(evidence)


@check("depth at which acceptance falls")
def falling(seen: Examination) -> Finding:
    """Check by depth: where guesses become much worse, trees should be wide and not deep."""
    alpha = seen.evaluation.alpha
    evidence = "alpha " + ", ".join(f"{value:.2f}" for value in alpha)
    for depth, (before, after) in enumerate(pairwise(alpha), 2):
        if after < FALL * before:
            return Finding(
                f"{evidence}: it falls at depth {depth}",
                "train longer, or give deep guesses more weight (head.depth_decay nearer to 1)",
            )
    return Finding(evidence)


def planner_of(patient: Patient) -> Finding:
    """The planner's choice for one user, by what steps cost on this machine."""
    drafter = head_drafter(patient.head, patient.target)
    decoder = decoder_for(patient.target, drafter, None, compile=None)
    plan = measured_plan(decoder, batch=1, temperature=0.0, fresh=False)
    chosen = next(row for row in plan.rows if row.chosen)
    if chosen.nodes > 1:
        return Finding(plan.notes[0])
    return Finding(
        plan.notes[0],
        "a better head, or a cheaper one; `drafthead explain tree` shows what each size costs",
    )
