"""Tables about a head: what its checkpoint holds, and how well it drafts."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape

from drafthead.core.printing import printable
from drafthead.core.target.gguf_files import ACCOUNT_FILE, model_folder
from drafthead.heads.formats import build_head, read_foreign
from drafthead.heads.formats.base import Foreign, Format, TargetFacts
from drafthead.heads.growing.static import grow_tree
from drafthead.lab.reports.report import Report, Table, number
from drafthead.train.learning.evaluation import SHORT_CHAIN, TREE_SIZES, Evaluation
from drafthead.train.learning.ranks import Ranked
from drafthead.train.run.folder import BEST_BY

UNKNOWN = "not recorded"
LONGEST = 90  # characters of a value that are shown
# The tables of what was right at each depth: title, first column, field of an `Evaluation`.
BY_DEPTH = (
    ("first guesses that are right, where all before them were", "alpha", "alpha"),
    ("first guesses that are right, at all positions", "top 1", "top1"),
    ("right tokens among the first eight guesses, at all positions", "top 8", "top8"),
)
TAU_NOTE = (
    "tau: each column uses trees of one size at every step; in compare it is often smaller, as "
    "only trees that pay on the machine are used; the progress bar of training counts all positions"
)


def described(path: Path) -> tuple[Table, list[str]]:
    """The contents of a head's checkpoint, or the facts of a GGUF file, as a table; and notes."""
    account, notes = Path(model_folder(path)) / ACCOUNT_FILE, list[str]()
    if account.exists():
        rows = rows_of_file(json.loads(account.read_text(encoding="utf-8")), account.parent)
    else:
        known, foreign = read_foreign(path, TargetFacts())
        if not foreign.needs_target:
            build_head(foreign, path)
        rows, notes = rows_of(known, foreign), [*map(printable, foreign.notes)]
    cells = [[escape(cell) for cell in row] for row in rows]
    return Table(escape(printable(str(path))), ("", "value"), cells), notes


def rows_of(known: Format, foreign: Foreign) -> list[tuple[str, str]]:
    """Return what is known of a head, as rows of name and value that are fit to print."""
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
        ("measured acceptance", acceptance(foreign.path_counts)),
        *((f"config {name}", value_of(value)) for name, value in asdict(foreign.config).items()),
        *(
            (f"origin {name}", value if isinstance(value, str) else json.dumps(value))
            for name, value in foreign.provenance.items()
        ),
        ("checked", checked(foreign)),
    ]
    if foreign.needs_target:
        rows.append(("left to the target", foreign.needs_target))
    return [(printable(name, LONGEST), printable(value, LONGEST)) for name, value in rows]


def acceptance(counts: dict[tuple[int, ...], int] | None) -> str:
    """The mean of what trees of BEST_BY nodes bring, where that was measured."""
    if not counts or not counts.get(()):
        return "not measured"
    right = sum(counts[path] for path in grow_tree(counts, BEST_BY).paths)
    tokens = f"{1 + right / counts[()]:.2f} tokens per pass"
    return f"{tokens} with trees of {BEST_BY} nodes, after every token of held-out answers"


def value_of(value: object) -> str:
    """A setting as text; numbers that went through float32 lose what that added."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def rows_of_file(account: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Facts about a GGUF file, as rows of name and value that are fit to print."""
    rows = [
        ("format", f"GGUF, architecture {account['architecture']}, {account['weights']} tensors"),
        ("configuration and tokenizer", str(folder)),
        ("rotary positions", json.dumps(account["rope"])),
        ("ends of answers", ", ".join(map(str, account["ends"])) or "none"),
        *((key, "is followed") for key in account["keys_used"]),
        *((key, "changes nothing") for key in account["keys_neutral"]),
    ]
    return [(printable(name), printable(value)) for name, value in rows]


def checked(foreign: Foreign) -> str:
    """Return how much of what loading checks was checked here."""
    if foreign.needs_target:
        return "configuration and values; not names, shapes and types of tensors without the target"
    return "configuration and all tensors; not whether it fits its target"


def vocabulary(foreign: Foreign) -> str:
    """Return which tokens the head can draft."""
    if "d2t" in foreign.tensors:
        return f"{foreign.tensors['d2t'].numel():,} of {foreign.target.vocab_size or UNKNOWN}"
    return "the target's"


def evaluation_report(
    found: dict[str, Evaluation],
    ranked: dict[str, Ranked],
    lengths: dict[str, dict[str, dict[str, float]]],  # of each file, see `by_length`
    training: Sequence[str],
    about: dict[str, Any],
) -> Report:
    """Tau by size of the tree and by length, then acceptance by depth; a line is a file.

    `training` are sentences on what more of it would bring; `about` holds machine and command.
    """
    trees = ["chain", f"chain of {SHORT_CHAIN}", *(f"{nodes} nodes" for nodes in TREE_SIZES)]
    taus = [
        [
            *(Path(source).name, str(len(ranked[source].data.sequences)), str(e.anchors)),
            *map(number, (e.tau_chain, e.tau_short_chain, *map(e.tau_tree.get, TREE_SIZES))),
        ]
        for source, e in found.items()
    ]
    columns = ["tau", "conversations", "tokens", *trees]
    shown = [Table("tokens per pass of the target", columns, taus)]
    for source, evaluation in found.items():
        if len(evaluation.categories) > 1:
            kinds = [(name, number(tau)) for name, tau in evaluation.categories.items()]
            title = f"{Path(source).name}: tau at {BEST_BY} nodes by category"
            shown.append(Table(title, ["category", "tau"], kinds))
    for source, by_length in lengths.items():
        rows = [
            [name, number(row["tokens"], 0), *(number(row[tree]) for tree in trees)]
            for name, row in by_length.items()
        ]
        title = f"{Path(source).name}: tau by the tokens before a step"
        shown.append(Table(title, ["tokens before", "tokens", *trees], rows))
    depths = [f"depth {k}" for k in range(1, 1 + max(len(e.alpha) for e in found.values()))]
    for title, corner, name in BY_DEPTH:
        rows = [[Path(source).name, *map(number, getattr(e, name))] for source, e in found.items()]
        shown.append(Table(title, [corner, *depths], rows))
    data = {source: e.summary() | {"by_length": lengths[source]} for source, e in found.items()}
    notes = [TAU_NOTE, *(f"its training: {sentence}" for sentence in training)]
    return Report(shown, notes, {**about, "data": data})
