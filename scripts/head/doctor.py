"""`drafthead head doctor`: why a head is accepted seldom."""

from dataclasses import asdict
from typing import Annotated

import typer

from drafthead.scripts import options

PLANNER = "plain decoding is faster"


def main(
    *,
    head: options.HeadPath,
    model: options.Model,
    data: Annotated[
        str, typer.Option(help="The model's own answers. Do not use the training data.")
    ],
    limit: options.AnswerLimit = 100,
    rows: options.Rows,
    output: options.JsonFile = None,
) -> None:
    """Find out why few drafts of a head are accepted, and what to do.

    The model reads each answer once, and the head predicts after each token. The checks are: who
    wrote the answers and how, whether prompts are rendered as in decoding, the head's taps and
    draft vocabulary, loops and cut answers, whether the head was trained on these answers, for this
    model and for long enough, at which depth acceptance falls, and whether drafts pay on this
    machine. Each line says what was found and, for a fault, what to do.
    """
    from drafthead.lab.diagnosis.checks import CHECKS, planner_of
    from drafthead.lab.diagnosis.examination import ROW, examine, patient_of
    from drafthead.lab.races.record import write_record
    from drafthead.lab.reports.report import print_table
    from drafthead.lab.reports.run_page import findings_table

    patient = patient_of(model.load(), model.target, head, rows.reading(data, ROW, limit))
    seen = examine(patient)
    findings = {name: found for name, look in CHECKS.items() if (found := look(seen)) is not None}
    findings[PLANNER] = planner_of(patient)
    faults = sum(found.is_fault for found in findings.values())
    print_table(findings_table(findings, f"{len(findings)} checks, faults: {faults}"))
    if output is not None:
        record = {
            "head": str(head),
            "data": data,
            "evaluation": seen.evaluation.summary(),
            "findings": {name: asdict(found) for name, found in findings.items()},
        }
        write_record(output, model.target, patient.target, record)
