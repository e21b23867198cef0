"""`drafthead plan-tree`: what each size of tree costs and brings here, and which is chosen."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib import pyplot as plt

from drafthead.heads.drafting.drafter import UNMEASURED_ALPHA, Drafter
from drafthead.heads.errors import UserError
from drafthead.heads.files import write_text
from drafthead.infer import Decoder
from drafthead.infer.engine.planner import AdaptivePlan
from drafthead.infer.measuring.plan_table import PlanRow, plan_rows, reason
from drafthead.infer.timing.step_costs import cost_file, rows_timed, step_seconds
from drafthead.infer.timing.step_timing import PROMPT_TOKENS
from drafthead.infer.verifiers import verifier_for
from drafthead.scripts import options
from drafthead.scripts.measuring import describe_run
from drafthead.scripts.reports.tables import BASELINE, OURS, print_table, save_figure

logger = logging.getLogger(__name__)

COLUMNS = ("nodes", "depth", "step ms", "tokens a step", "tokens/s", "speedup", "choice")


def main(
    target: options.TargetName,
    head: Annotated[Path, typer.Option(help="Folder of a trained head.")],
    batch: options.BatchSize = 1,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy; above, the size is chosen as for a single row.")
    ] = 0.0,
    compile: Annotated[
        bool, typer.Option(help="Plan for compiled passes: minutes at the first time.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option(help="Time the steps anew and keep the new times.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="JSON file to write; a picture is put beside it.")
    ] = None,
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = "auto",
) -> None:
    """Show the numbers from which decoding chooses the size of its token trees.

    A larger tree brings more tokens a step and makes the step longer. For every size: the time of a
    step on this machine, timed once and kept (--fresh times anew), the tokens that the head's
    acceptance on held-out answers lets expect, and their quotient, tokens per second of one row.
    The smallest size within 3 % of the best is chosen, and plain decoding (1 node) is a choice.
    While decoding, the choice follows what is really accepted; --tree-nodes of the other verbs
    overrules it.
    """
    if batch < 1:
        raise UserError(f"--batch must be at least 1, got {batch}")
    rule = verifier_for("auto", temperature, follows=True)
    decoder = Decoder.from_pretrained(target, head, dtype=dtype, device=device, compile=compile)
    drafter = decoder.drafter
    assert drafter is not None
    timed = rows_timed(rule, batch)
    kept = cost_file(decoder.target, drafter, timed, rule)
    remembered = kept.exists() and not fresh
    if not remembered:
        logger.info("timing steps of %d sizes of tree", len(drafter.budgets))
    seconds = step_seconds(decoder.target, drafter, timed, rule, fresh)
    plan = AdaptivePlan(seconds, {budget: drafter.chances(budget) for budget in drafter.budgets})
    rows, why = plan_rows(plan), reason(plan_rows(plan))
    notes = [why, timing_note(timed, batch, remembered, kept)]
    if all(drafter.chances(b) == Drafter.chances(drafter, b) for b in drafter.budgets):
        notes.append(
            "the head's acceptance was never measured: each depth is taken to be accepted "
            f"{UNMEASURED_ALPHA:g} times as often as the one before"
        )
    if temperature > 0:
        notes.append(
            "expected tokens are those of greedy decoding; above temperature 0 fewer are accepted, "
            "and the choice follows what is"
        )
    print_table(f"{head} on {target}", COLUMNS, [cells(row) for row in rows], notes)
    if output is not None:
        about = {
            **describe_run(target, decoder.target),
            "head": str(head),
            "batch": batch,
            "rows_timed": timed,
            "temperature": temperature,
            "compiled": compile,
        }
        write_plan(rows, why, about, output)


def timing_note(timed: int, batch: int, remembered: bool, kept: Path) -> str:
    """How the steps were timed, and whether just now."""
    rows = f"{timed} row{'s' if timed > 1 else ''}"
    if timed != batch:
        rows += f" (the planner's choice for a batch of {batch})"
    when = "kept from an earlier run, --fresh times anew" if remembered else "timed now"
    return f"steps of {rows} behind {PROMPT_TOKENS} prompt tokens, {when}: {kept}"


def cells(row: PlanRow) -> list[str]:
    """One size as text."""
    return [
        str(row.nodes),
        str(row.depth),
        f"{1000 * row.step_seconds:.2f}",
        f"{row.tokens:.2f}",
        f"{row.tokens_per_second:.1f}",
        f"{row.speedup:.2f}",
        ("none: plain decoding" if row.depth == 0 else "<--") if row.chosen else "",
    ]


def write_plan(rows: Sequence[PlanRow], why: str, about: dict[str, Any], output: Path) -> None:
    """Write the plan as JSON, and tokens/s against nodes as a picture beside it."""
    chosen = next(row for row in rows if row.chosen)
    choice = {"nodes": chosen.nodes, "depth": chosen.depth} if chosen.depth else None
    content = {**about, "choice": choice, "reason": why, "sizes": [asdict(row) for row in rows]}
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, json.dumps(content, indent=2) + "\n")
    picture = output.with_suffix(".png")
    draw(rows, f"{about['head']} on {about['target']}, {about['dtype']}", picture)
    print(f"written: {output}, {picture.name}")


def draw(rows: Sequence[PlanRow], title: str, path: Path) -> None:
    """Expected tokens/s against nodes, the choice marked, plain decoding as a line."""
    plain = rows[0]
    chosen = next(row for row in rows if row.chosen)
    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot([r.nodes for r in rows], [r.tokens_per_second for r in rows], "o-", color=OURS)
    axes.plot(chosen.nodes, chosen.tokens_per_second, "o", ms=12, mfc="none", color=OURS)
    label = f"{chosen.nodes} nodes, {chosen.speedup:.2f}x" if chosen.depth else "plain decoding"
    point = (chosen.nodes, chosen.tokens_per_second)
    axes.annotate(label, point, (0, 9), textcoords="offset points", ha="center", fontsize=9)
    axes.axhline(plain.tokens_per_second, ls="--", color=BASELINE, lw=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks([r.nodes for r in rows], [str(r.nodes) for r in rows])
    axes.minorticks_off()
    axes.set_ylim(0, 1.15 * max(r.tokens_per_second for r in rows))
    axes.set_xlabel("nodes of the tree (1: plain decoding)")
    axes.set_ylabel("expected tokens/s of a row")
    axes.set_title(title, fontsize=9)
    figure.tight_layout()
    save_figure(figure, path)
