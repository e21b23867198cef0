"""`drafthead head evaluate`: how well a head drafts given answers, by file and by depth."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field

from drafthead.core.errors import UserError
from drafthead.core.settings import AtLeastOne
from drafthead.scripts import options

if TYPE_CHECKING:
    from drafthead.train.learning.evaluation import Evaluation

Length = Annotated[
    AtLeastOne, Field(description="Tokens that are read of a conversation; longer ones are cut.")
]
Saving = Annotated[
    bool,
    typer.Option(
        "--save-acceptance",
        help="Write what was accepted into the head's folder: decoding then begins with trees for "
        "it. Training does so with its held-out answers.",
    ),
]


def main(
    *,
    head: options.HeadPath,
    model: options.Model,
    data: Annotated[
        list[str],
        options.OfData,
        typer.Option(help="The model's own answers. Repeatable."),
    ],
    limit: options.AnswerLimit = 200,
    max_length: Length = 1024,
    rows: options.Rows,
    output: options.JsonFile = None,
    save_acceptance: Saving = False,
) -> None:
    """Measure how many tokens of answers a head gets accepted.

    Nothing is generated: the model reads each answer once, the head predicts after each token, and
    decoding is simulated. This takes seconds and gives the same tau as greedy decoding of these
    answers. Use answers that the head was not trained on. With one file per kind of request, or
    per length of the prompt, you see which one needs more training data.
    """
    from drafthead.core.target.weights_hash import weights_fingerprint
    from drafthead.heads.formats.loading import load_head
    from drafthead.lab.diagnosis.examination import ranked_answers, read_answers
    from drafthead.lab.learning_curve import what_more_would_bring
    from drafthead.lab.races.record import describe_run
    from drafthead.lab.reports.head import evaluation_report
    from drafthead.train.data.training_rows import check_writers
    from drafthead.train.learning.evaluation import by_length, evaluation_of
    from drafthead.train.run.folder import BEST_FOLDER

    if save_acceptance:
        refuse_other_folder(head)
    target = model.load()
    trained, weights = load_head(head, target), weights_fingerprint(target)
    tables = {
        source: read_answers(rows.reading(source, max_length, limit), target) for source in data
    }
    for source, table in tables.items():
        check_writers(source, table.writers, model.target, weights)
    ranked = ranked_answers(trained, target, tables)
    found = {source: evaluation_of(*answers) for source, answers in ranked.items()}
    lengths = {source: by_length(answers) for source, answers in ranked.items()}
    training = what_more_would_bring(head.parent if head.name == BEST_FOLDER else head)
    about = {**describe_run(model.target, target), "head": str(head)}
    options.finish(evaluation_report(found, ranked, lengths, training, about), output)
    if save_acceptance:
        save(head, found)


def refuse_other_folder(head: Path) -> None:
    """Raise UserError for a folder that what was accepted cannot be written into."""
    from drafthead.heads.formats.drafthead import is_own_folder

    if not is_own_folder(head):
        raise UserError(
            f"--save-acceptance writes into a folder that holds a head of our format, and {head} "
            "is none: make one of it with drafthead head import"
        )


def save(head: Path, found: "Mapping[str, Evaluation]") -> None:
    """Write what was accepted of all sources into the head's folder."""
    from drafthead.heads.formats.drafthead import write_acceptance

    everywhere = Counter[tuple[int, ...]]()
    for evaluation in found.values():
        everywhere.update(evaluation.path_counts)
    write_acceptance(head, everywhere)
