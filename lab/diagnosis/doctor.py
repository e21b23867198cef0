"""What the doctor examines, asks the planner, and prints."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from drafthead.heads.formats import build_head, read_foreign
from drafthead.heads.formats.base import TargetFacts
from drafthead.heads.target.chat_template import TemplateArguments
from drafthead.heads.target.target import Target
from drafthead.infer.decoder import decoder_for
from drafthead.infer.loaded import head_drafter
from drafthead.lab.diagnosis.checks import Finding, faults_first
from drafthead.lab.diagnosis.examination import Patient
from drafthead.lab.profiling.plan_table import measured_plan
from drafthead.lab.races.record import read_answers
from drafthead.train.data.conversations import Conversation, read_conversations
from drafthead.train.data.fitted_rows import Reading
from drafthead.train.data.left_out import LeftOut


def patient_of(model: Target, name: str, head: Path, reading: Reading) -> Patient:
    """Load what is examined; raises UserError for what cannot be read."""
    _, foreign = read_foreign(head, TargetFacts.of(model))
    built = build_head(foreign, head, model).to(model.device, model.dtype)
    answers = read_answers(reading, model)  # says what is left out
    conversations = read_conversations(
        reading.source, reading.prompt_column, reading.limit, LeftOut(reading.strict)
    )
    return Patient(
        model,
        name,
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
        "a better head, or a cheaper one; `drafthead explain tree --compile` shows compiled steps",
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
