"""Does a server accept as many drafts as decoding here? If not, which fault would it be?

The same prompts are decoded here with chains of the same length. Where the counts differ, the head
is read wrongly in each of the ways that are known of servers, to see which one explains them.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from scipy.stats import fisher_exact

from drafthead.heads.base import DraftHead
from drafthead.heads.formats.loading import load_head
from drafthead.infer.loading.loaded import named_draft
from drafthead.lab.diagnosis.findings import Finding
from drafthead.lab.servers.asked import DraftCounters
from drafthead.lab.servers.audit import FALSE_ALARM, Audit, check
from drafthead.lab.theory.chains import Chains, head_chains, named_chains

MEAN_ERROR = 0.1  # of the mean length, of a server that has no counts


@check("accepted drafts")
def accepted_drafts(audit: Audit) -> Finding | None:
    """The server's counters for the greedy answers, beside decoding here with the same drafter."""
    theirs = audit.drafts
    if theirs is None or (not theirs.drafts and theirs.mean_length is None):
        return Finding("/metrics counts no drafts: not tested, or nothing is drafted")
    if audit.draft is None:
        evidence = f"the server: {described(theirs)}"
        return Finding(f"{evidence}. With --head it is compared with decoding here")
    draft = named_draft(audit.draft)
    if draft.kind.beside and theirs.drafts:  # it drafts at some steps alone: count all of them
        theirs = audit.drafts = replace(theirs, drafts=audit.steps(sum(theirs.accepted)))
    chains = named_chains("drafter", draft, audit.target, "auto")
    length = min(len(theirs.accepted) or chains.longest, chains.longest)
    ours = audit.drafts_here = decoded(audit, chains, length)
    evidence = f"the server: {described(theirs)}. Here: {described(ours)}"
    if same(theirs, ours):
        return Finding(evidence)
    if draft.name == "head":
        for cause, other in misread(load_head(Path(draft.argument), audit.target)):
            misled = head_chains("head", other, audit.target)
            if same(theirs, decoded(audit, misled, length)):
                return Finding(evidence, f"{cause}: so read, it is accepted as seldom here")
    return Finding(evidence, by_position(theirs, ours))


def decoded(audit: Audit, chains: Chains, length: int) -> DraftCounters:
    """Return what decoding the prompts here accepts of a drafter's chains of `length` tokens."""
    decoder, new = chains.decoder(length), audit.max_new_tokens
    stats = decoder.generate(audit.prompts, max_new_tokens=new, use_model_defaults=False).stats
    drafts = [n - 1 for row in stats.accept_lengths for n in row]
    reached = tuple(sum(n > place for n in drafts) for place in range(length))
    return DraftCounters(len(drafts), reached)


def described(found: DraftCounters) -> str:
    """Counts in words."""
    shares = " ".join(f"{count / found.drafts:.0%}" for count in found.accepted if found.drafts)
    by_place = f"of {found.drafts} drafts {shares} by position, " if found.drafts else ""
    return f"{by_place}{found.length:.2f} tokens per step"


def same(theirs: DraftCounters, ours: DraftCounters) -> bool:
    """Whether two counts may be of the same drafts, at every position (Fisher's exact test)."""
    if not theirs.drafts:
        return abs(theirs.length - ours.length) < MEAN_ERROR * ours.length
    tables = [
        [[one, theirs.drafts - one], [other, ours.drafts - other]]
        for one, other in zip(theirs.accepted, ours.accepted, strict=False)
    ]
    return all(fisher_exact(table).pvalue >= FALSE_ALARM / len(tables) for table in tables)


def by_position(theirs: DraftCounters, ours: DraftCounters) -> str:
    """A likely cause by where acceptance is lost."""
    first = [count.accepted[0] / max(1, count.drafts) for count in (theirs, ours) if count.accepted]
    if len(first) < 2 or first[0] < first[1] / 3:
        return "hardly a first guess is right: tapped layers, a norm before them, or the vocabulary"
    if first[0] < 0.9 * first[1]:
        return "first guesses are worse: tapped layers off by one, a norm is missing, other weights"
    if theirs.accepted[-1] < ours.accepted[-1]:
        return "only later guesses are worse: causality, positions, or the norm of what is fed back"
    return "more is accepted than here: other drafts or prompts, or drafts accepted too readily"


def misread(head: DraftHead) -> Iterator[tuple[str, DraftHead]]:
    """The head as servers have read it wrongly, and what the fault is."""
    config = head.config
    taps = getattr(config, "taps", ())
    for shift in (1, -1):
        if taps and min(taps) + shift >= 0:
            moved = tuple(tap + shift for tap in taps)
            yield f"tapped layers are off by one ({list(moved)})", rebuilt(head, taps=moved)
    if getattr(config, "draft_vocab_size", 0):
        other = rebuilt(head)
        state = other.state_dict()
        state["d2t"] = state["d2t"].roll(1)
        other.load_state_dict(state)
        yield "the draft vocabulary has an offset", other
    for option, cause in (
        ("norm_feedback", "the norm of what is fed back (norm_output) is lost"),
        ("norm_before_residual", "norm_before_residual is taken wrongly"),
        ("causal", "causality within the block is taken wrongly"),
    ):
        if hasattr(config, option):
            yield cause, rebuilt(head, **{option: not getattr(config, option)})


def rebuilt(head: DraftHead, **options: object) -> DraftHead:
    """A copy of a head, with other options of its configuration and the same weights."""
    made = type(head)(replace(head.config, **options))
    made.load_state_dict(head.state_dict())
    device, dtype = next((p.device, p.dtype) for p in head.parameters())
    return made.to(device, dtype).eval().requires_grad_(False)
