"""`drafthead evaluate`: how well a head drafts given answers, by file and by depth."""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from accelerate import Accelerator
from tqdm import tqdm

from drafthead.heads.base import DraftHead
from drafthead.heads.errors import UserError
from drafthead.heads.formats.drafthead import is_own_folder, write_acceptance
from drafthead.heads.formats.loading import load_head
from drafthead.heads.storage.files import write_text
from drafthead.heads.target.target import Target
from drafthead.heads.trees.tree import Path as TreePath
from drafthead.lab.races.record import ROW, describe_run, read_answers
from drafthead.lab.reports.report import Table, number, print_table
from drafthead.scripts import options
from drafthead.train.data.fitted_rows import Reading
from drafthead.train.data.packing import pack_sequences
from drafthead.train.data.token_table import TokenTable
from drafthead.train.data.training_rows import check_writers
from drafthead.train.jobs.weights import weights_fingerprint
from drafthead.train.learning.evaluation import TREE_SIZES, Evaluation, evaluate
from drafthead.train.learning.step import LossModule

# The tables of what was right at each depth: title, first column, field of an `Evaluation`.
BY_DEPTH = (
    ("first guesses that are right, where all before them were", "alpha", "alpha"),
    ("first guesses that are right, at all positions", "top 1", "top1"),
    ("right tokens among the first eight guesses, at all positions", "top 8", "top8"),
)


def main(
    target: options.TargetName,
    head: options.NeededHeadName,
    data: Annotated[
        list[str],
        typer.Option(help="Answers of the target: as for training. Several may be given."),
    ],
    limit: Annotated[
        int,
        typer.Option(
            help="Use this many conversations of each file, from the first.",
            callback=options.at_least_one,
        ),
    ] = 200,
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    save_acceptance: Annotated[
        bool,
        typer.Option(
            "--save-acceptance",
            help="Write what was accepted into the head's folder: decoding then begins with "
            "trees for it. Training does so with its held-out answers.",
        ),
    ] = False,
    prompt_column: options.PromptColumn = None,
    template_argument: options.TemplateArgument = None,
    strict: options.Strict = False,
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = "auto",
) -> None:
    """Measure how well a head drafts answers that the target has written before.

    Nothing is decoded: the target reads each answer once, the head guesses after each of its
    tokens, and decoding is played again from the ranks of the true tokens. So this takes seconds
    where `compare` takes minutes, and gives the same tau as greedy decoding of these answers. Give
    answers that the head was not trained on, one file for each kind of request: a head that drafts
    one kind well and another badly lacks training data of the other.
    """
    if save_acceptance and not is_own_folder(head):
        raise UserError(
            f"--save-acceptance writes into a folder that holds a head of our format, and {head} "
            "is none: make one of it with drafthead import"
        )
    model = Target.from_pretrained(target, dtype, device)
    trained = load_head(head, model)
    arguments = options.template_values(template_argument)
    readings = [
        Reading(source, prompt_column, ROW, limit, template_arguments=arguments, strict=strict)
        for source in data
    ]
    tables = {reading.source: read_answers(reading, model) for reading in readings}
    weights = weights_fingerprint(model)
    for source, table in tables.items():
        check_writers(source, table.writers, target, weights)
    found = evaluations(trained, model, tables)
    print_evaluations(found, tables)
    if save_acceptance:
        everywhere: Counter[TreePath] = Counter()
        for evaluation in found.values():
            everywhere.update(evaluation.path_counts)
        write_acceptance(head, everywhere)
    if output is not None:
        summaries = {source: evaluation.summary() for source, evaluation in found.items()}
        record = describe_run(target, model) | {"head": str(head), "data": summaries}
        write_text(output, json.dumps(record, indent=2) + "\n")


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
