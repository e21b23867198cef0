"""How well a head drafts answers, source by source, as tables."""

from pathlib import Path

from accelerate import Accelerator
from tqdm import tqdm

from drafthead.heads.base import DraftHead
from drafthead.heads.target.target import Target
from drafthead.lab.reports.report import Table, number, print_table
from drafthead.train.data.packing import pack_sequences
from drafthead.train.data.token_table import TokenTable
from drafthead.train.learning.evaluation import TREE_SIZES, Evaluation, evaluate
from drafthead.train.learning.step import LossModule

# The tables of what was right at each depth: title, first column, field of an `Evaluation`.
BY_DEPTH = (
    ("first guesses that are right, where all before them were", "alpha", "alpha"),
    ("first guesses that are right, at all positions", "top 1", "top1"),
    ("right tokens among the first eight guesses, at all positions", "top 8", "top8"),
)


def evaluations(
    head: DraftHead, target: Target, tables: dict[str, TokenTable]
) -> dict[str, Evaluation]:
    """How well a head drafts the answers of each source."""
    accelerator = Accelerator(cpu=target.device.type == "cpu", mixed_precision="no")
    module = LossModule(head, target, "no")  # in the number type that decoding has
    found: dict[str, Evaluation] = {}
    for source, table in tables.items():
        packed = pack_sequences(table, int(table.lengths.max()), seed=0)
        with tqdm(total=len(packed.rows), desc=source, unit="row", leave=False) as bar:
            found[source] = evaluate(accelerator, module, head, target, packed, 1, bar.update)
    return found


# Under the first table.
TAU_NOTE = (
    "each column drafts trees of one size at every step; compare has the tau of the trees that pay "
    "on a machine, which may be smaller, and training's bar counts guesses after all tokens"
)


def print_evaluations(found: dict[str, Evaluation], tables: dict[str, TokenTable]) -> None:
    """Print tau by size of the tree, then acceptance by depth; a line is a file."""
    sizes = [f"{nodes} nodes" for nodes in TREE_SIZES]
    taus = [
        [
            Path(source).name,
            str(len(tables[source])),
            str(evaluation.anchors),
            number(evaluation.tau_chain),
            *(number(evaluation.tau_tree[nodes]) for nodes in TREE_SIZES),
        ]
        for source, evaluation in found.items()
    ]
    columns = ["tau", "conversations", "tokens", "chain", *sizes]
    print_table(Table("tokens a pass of the target", columns, taus), [TAU_NOTE])
    depths = [f"depth {k}" for k in range(1, 1 + max(len(e.alpha) for e in found.values()))]
    for title, corner, name in BY_DEPTH:
        rows = [[Path(source).name, *map(number, getattr(e, name))] for source, e in found.items()]
        print_table(Table(title, [corner, *depths], rows))
