"""`drafthead plan-skip`: which of a target's own layers would draft best for it."""

import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from drafthead.contrib.own_layers.layer_choice import as_list
from drafthead.heads.errors import UserError
from drafthead.heads.target.target import Target
from drafthead.lab.own_layers.layer_acceptance import guessed_answers
from drafthead.lab.own_layers.layer_plan import LayerPlan
from drafthead.lab.own_layers.layer_search import LayerSearch, LayerSet
from drafthead.lab.races.record import ROW, describe_run, read_answers
from drafthead.lab.reports.tables import number, print_table
from drafthead.scripts import options
from drafthead.train.data.checks import check_writers
from drafthead.train.data.token_table import Reading
from drafthead.train.jobs.weights import weights_fingerprint


def main(
    target: options.TargetName,
    data: Annotated[str, typer.Option(help="Answers of the target: as for training.")],
    output: Annotated[Path, typer.Option(help="JSON file to write, for --draft-layers.")],
    skip: Annotated[
        int | None,
        typer.Option(help="Leave out so many layers; by default the number that promises most."),
    ] = None,
    limit: Annotated[
        int,
        typer.Option(
            help="Use this many conversations, from the first.", callback=options.at_least_one
        ),
    ] = 32,
    minutes: Annotated[float, typer.Option(help="End the search after so long.")] = 10.0,
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = "auto",
) -> None:
    """Search the layers of a target that would draft best for the whole of it.

    Two kinds of sets are tried: the first layers alone (early exit), and all layers but some, which
    are left out one by one, each time the one without which most tokens are still guessed. Half of
    the answers choose, the others give alpha: the share of first guesses that are the target's most
    probable token. c is the share of the target's weights that the set reads. From these two follow
    the best length of a chain and its speedup over plain decoding; nothing is timed. The file is
    written after each set, and the same command goes on with it.
    """
    loaded = Target.from_pretrained(target, dtype, device)
    whole = loaded.num_layers
    if skip is not None and not 0 < skip < whole:
        raise UserError(f"--skip is {skip}, but of {whole} layers 1 to {whole - 1} can be left out")
    answers = read_answers(Reading(data, None, ROW, limit), loaded)
    if len(answers) < 2:
        raise UserError(f"{data} has one conversation: one is needed to choose, and one to report")
    weights = weights_fingerprint(loaded)
    check_writers(data, answers.writers, target, weights)
    made_of = {"weights": weights, "dtype": loaded.precision, "answers": answers.digest}
    plan = LayerPlan.begun(output, whole, made_of)
    about = describe_run(target, loaded)
    output.parent.mkdir(parents=True, exist_ok=True)
    rows = list(answers)
    halves = (guessed_answers(loaded, rows[first::2]) for first in (0, 1))
    ended = carry_out(
        plan,
        LayerSearch(loaded, *halves),
        1 if skip is None else whole - skip,
        time.monotonic() + 60 * minutes,
        lambda: plan.write(output, plan.best(skip), about),
    )
    print_plan(plan, skip, ended, output)


def carry_out(
    plan: LayerPlan,
    search: LayerSearch,
    least: int,
    deadline: float,
    save: Callable[[], None],
) -> bool:
    """Add what a plan lacks: all exits, and steps until `least` layers are left.

    Returns whether the steps came to their end before the deadline, in seconds of
    `time.monotonic`. A step that is not complete by then is dropped.
    """
    exits = range(len(plan.exits) + 1, plan.num_layers)
    total = len(exits) + max(0, len(plan.layers) - least)
    tried = count(1)
    with tqdm(total=total, desc="sets of layers", unit="set") as bar:

        def goes_on() -> bool:
            bar.set_postfix_str(f"{next(tried)} tried to leave out more")
            return time.monotonic() < deadline

        def keep(kind: list[LayerSet], layers: Sequence[int]) -> None:
            kind.append(search.promise(layers))
            save()
            bar.update()

        for number_of_layers in exits:
            keep(plan.exits, range(number_of_layers))
        while len(plan.layers) > least:
            less = search.with_one_less(plan.layers, goes_on)
            if less is None:
                return False
            keep(plan.steps, less)
    return True


def print_plan(plan: LayerPlan, skip: int | None, ended: bool, output: Path) -> None:
    """Print all sets, and what the best of them promises."""
    columns = ["layers", "number", "alpha", "c", "best chain", "speedup"]
    for title, sets in (("first layers alone", plan.exits), ("left out one by one", plan.steps)):
        print_table(title, columns, [row_of(each) for each in sets])
    best = plan.best(skip)
    assert best is not None
    notes = [verdict(best, output)]
    if not ended:
        notes.append(
            f"the time was over with {len(plan.layers)} layers left: the same command goes on"
        )
    print_table("", [], [], notes)


def row_of(each: LayerSet) -> list[str]:
    """A line of the tables."""
    figures = [number(each.alpha), number(each.c), str(each.chain), number(each.speedup)]
    return [as_list(each.layers), str(len(each.layers)), *figures]


def verdict(best: LayerSet, output: Path) -> str:
    """Whether to draft with the best set."""
    promise = (
        f"layers {as_list(best.layers)}: of a chain of {best.chain}, {number(best.speedup)} times "
        "plain decoding is to be expected"
    )
    if best.speedup <= 1:
        return f"no set promises to be faster than plain decoding; the least slow one is {promise}"
    return f"the best set is {promise}; decode with --draft-layers {output}"
