"""Which tokens of padded rows belong to the prompts: by a mask, or by the pad token."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from drafthead.heads.errors import UserError
from drafthead.heads.target.target import Target


@dataclass(frozen=True)
class PadToken:
    """The token that fills rows up, and whether it can also be a part of texts."""

    id: int
    in_texts: bool  # it is the same token as one that begins or ends texts


def pad_token_of(target: Target) -> PadToken | None:
    """The pad token of the target's tokenizer, or of its generation config; None without one."""
    sources = [source for source in (target.tokenizer, target.model.generation_config) if source]
    pads = [pad for source in sources if (pad := source.pad_token_id) is not None]
    if not pads:
        return None
    texts = {source.bos_token_id for source in sources} | target.end_ids
    if target.tokenizer is not None:
        texts.add(target.tokenizer.eos_token_id)
    return PadToken(pads[0], pads[0] in texts)


def masked(rows: Sequence[Sequence[int]], mask: Sequence[Sequence[object]]) -> list[list[int]]:
    """The tokens of each row that its mask keeps: 1 is a token, 0 is padding before or after.

    Raises UserError when the mask has another shape than the rows, or 0 between two tokens.
    """
    if len(mask) != len(rows):
        raise UserError(f"attention_mask has {len(mask)} rows for {len(rows)} prompts")
    return [masked_row(number, *pair) for number, pair in enumerate(zip(rows, mask, strict=True))]


def masked_row(number: int, row: Sequence[int], mask: Sequence[object]) -> list[int]:
    """`masked` for one row.

    Row (0, 0, 5, 6) with mask (0, 0, 1, 1) is the prompt 5 6.
    """
    about = f"row {number} of attention_mask"
    if len(mask) != len(row):
        raise UserError(f"{about} has {len(mask)} entries for {len(row)} tokens")
    if any(entry not in (0, 1) for entry in mask):
        raise UserError(f"{about} must hold nothing but 0 and 1")
    places = [place for place, entry in enumerate(mask) if entry]
    if places and places[-1] - places[0] + 1 != len(places):
        raise UserError(f"{about} has a hole: only tokens at the beginning or end can be masked")
    return [row[place] for place in places]


def without_padding(rows: Sequence[Sequence[int]], pad: PadToken | None) -> list[list[int]]:
    """Rows without the pad tokens at their beginning and end.

    As in transformers, a pad token that also begins or ends texts is taken as text. Raises
    UserError where that is likely to be wrong: rows begin or end with different numbers of it.
    """
    if pad is None:
        return [list(row) for row in rows]
    before = [sum(1 for _ in takewhile(pad.id.__eq__, row)) for row in rows]
    after = [sum(1 for _ in takewhile(pad.id.__eq__, reversed(row))) for row in rows]
    if not pad.in_texts:
        ends = [len(row) - count for row, count in zip(rows, after, strict=True)]
        return [list(row[a:b]) for row, a, b in zip(rows, before, ends, strict=True)]
    if len(set(before)) > 1 or len(set(after)) > 1:
        raise UserError(
            f"token {pad.id} at the ends of the prompts may be padding or text, because it also "
            "begins or ends texts: pass attention_mask"
        )
    return [list(row) for row in rows]
