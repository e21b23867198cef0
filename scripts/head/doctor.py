"""`drafthead doctor`: why a head is accepted seldom."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from drafthead.heads.formats import build_head, read_foreign
from drafthead.heads.formats.base import TargetFacts
from drafthead.heads.storage.files import write_text
from drafthead.heads.target.chat_template import TemplateArguments
from drafthead.heads.target.target import Target
from drafthead.infer.decoder import decoder_for
from drafthead.infer.loaded import head_drafter
from drafthead.lab.diagnosis.checks import CHECKS, Finding, faults_first
from drafthead.lab.diagnosis.examination import Patient, examine
from drafthead.lab.races.record import ROW, describe_run, read_answers
from drafthead.scripts import options
from drafthead.scripts.explain.tree import measured_plan
from drafthead.train.data.conversations import Conversation, read_conversations
from drafthead.train.data.fitted_rows import Reading
from drafthead.train.data.left_out import LeftOut

PLANNER = "plain decoding is faster"


def main(
    target: options.TargetName,
    head: options.NeededHeadName,
    data: Annotated[str, typer.Option(help="Answers of the target, not those of the training.")],
    limit: Annotated[
        int,
        typer.Option(
            help="Use this many conversations, from the first.", callback=options.at_least_one
        ),
    ] = 100,
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    prompt_column: options.PromptColumn = None,
    template_argument: options.TemplateArgument = None,
    strict: options.Strict = False,
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = "auto",
) -> None:
    """Look for the reasons why a head is accepted seldom.

    The target reads each answer once, and the head guesses after each token of it. What is checked:
    who wrote the answers and how, whether prompts are rendered as in decoding, taps and draft
    vocabulary of the head, loops and cut answers, whether the head was trained on these answers,
    for this model and for long enough, at which depth its guesses fail, and whether the planner
    takes its trees on this machine. Each line says what was seen, and of a fault what to do.
    """
    arguments = options.template_values(template_argument)
    reading = Reading(data, prompt_column, ROW, limit, template_arguments=arguments, strict=strict)
    patient = patient_of(target, head, reading, dtype, device)
    seen = examine(patient)
    findings = {name: found for name, look in CHECKS.items() if (found := look(seen)) is not None}
    findings[PLANNER] = planner_of(patient)
    show(findings)
    if output is not None:
        record = describe_run(target, patient.target) | {
            "head": str(head),
            "data": data,
            "evaluation": seen.evaluation.summary(),
            "findings": {name: asdict(found) for name, found in findings.items()},
        }
        write_text(output, json.dumps(record, indent=2) + "\n")


def patient_of(target: str, head: Path, reading: Reading, dtype: str, device: str) -> Patient:
    """Load what is examined; raises UserError for what cannot be read."""
    model = Target.from_pretrained(target, dtype, device)
    _, foreign = read_foreign(head, TargetFacts.of(model))
    built = build_head(foreign, head, model).to(model.device, model.dtype)
    answers = read_answers(reading, model)  # says what is left out
    conversations = read_conversations(
        reading.source, reading.prompt_column, reading.limit, LeftOut(reading.strict)
    )
    return Patient(
        model,
        target,
        built,
        foreign.provenance,
        [with_arguments(one, reading.template_arguments) for one in conversations],
        answers,
    )


def with_arguments(conversation: Conversation, arguments: TemplateArguments) -> Conversation:
    """The conversation, with arguments of the chat template where it has none of its own."""
    own = conversation.template_arguments
    return replace(conversation, template_arguments={**arguments, **own})


def planner_of(patient: Patient) -> Finding:
    """What the planner takes for one user, uncompiled, by what steps cost on this machine."""
    drafter = head_drafter(patient.head, patient.target)
    decoder = decoder_for(patient.target, drafter, None, compile=False)
    plan = measured_plan(decoder, batch=1, temperature=0.0, fresh=False)
    chosen = next(row for row in plan.rows if row.chosen)
    if chosen.nodes > 1:
        return Finding(plan.notes[0])
    return Finding(
        plan.notes[0],
        "a better head, or a cheaper one; `drafthead plan-tree --compile` shows compiled steps",
    )


def show(findings: dict[str, Finding]) -> None:
    """Print what was seen, faults first, and of these what to do."""
    faults = [name for name, found in findings.items() if found.is_fault]
    table = Table(title=f"{len(findings)} checks, faults: {len(faults)}", show_lines=True)
    for column in ("fault", "found", "what was seen, and what to do"):
        table.add_column(column)
    for name, found in faults_first(findings).items():
        text = found.evidence if found.remedy is None else f"{found.evidence}\n> {found.remedy}"
        table.add_row(name, "yes" if found.is_fault else "no", text)
    Console(highlight=False, markup=False).print(table)
