"""`drafthead info`: what a checkpoint holds, ours or another's."""

import json
from dataclasses import asdict

from drafthead.heads.formats import build_head, read_foreign
from drafthead.heads.formats.base import Foreign, Format, TargetFacts
from drafthead.scripts import options
from drafthead.scripts.reports.tables import print_table

UNKNOWN = "not recorded"
LONGEST = 90  # characters of a value that are shown


def main(
    path: options.HeadPath,
) -> None:
    """Print family, target, size, features, vocabulary and origin of a draft head.

    The head is read as all other verbs read it, so a damaged one is refused here too.
    """
    known, foreign = read_foreign(path, TargetFacts())
    if not foreign.needs_target:
        build_head(foreign, path)
    print_table(str(path), ("", "value"), rows_of(known, foreign), foreign.notes)


def rows_of(known: Format, foreign: Foreign) -> list[tuple[str, str]]:
    """What is known of a head, as rows of name and value."""
    count = sum(tensor.numel() for tensor in foreign.tensors.values())
    kinds = sorted(
        {str(tensor.dtype).removeprefix("torch.") for tensor in foreign.tensors.values()}
    )
    target = foreign.target
    sizes = (
        f"hidden size {target.hidden_size or UNKNOWN}, vocabulary {target.vocab_size or UNKNOWN}, "
        f"layers {target.num_layers or UNKNOWN}"
    )
    rows = [
        ("format", f"{known.name} (read by {known.readers})"),
        ("family", foreign.family),
        ("target", f"{target.name or UNKNOWN}: {sizes}"),
        ("parameters", f"{count:,} in {', '.join(kinds)}"),
        ("features", foreign.taps),
        ("vocabulary", vocabulary(foreign)),
        ("measured acceptance", f"{len(foreign.path_counts or {})} paths"),
        *((f"config {name}", str(value)) for name, value in asdict(foreign.config).items()),
        *(
            (f"origin {name}", value if isinstance(value, str) else json.dumps(value))
            for name, value in foreign.provenance.items()
        ),
    ]
    if foreign.needs_target:
        rows.append(("left to the target", foreign.needs_target))
    return [(name, shortened(value)) for name, value in rows]


def vocabulary(foreign: Foreign) -> str:
    """Which tokens the head can draft."""
    if "d2t" in foreign.tensors:
        return f"{foreign.tensors['d2t'].numel():,} of {foreign.target.vocab_size or UNKNOWN}"
    return "the target's"


def shortened(text: str) -> str:
    """At most LONGEST characters of it."""
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
