"""`drafthead head doctor`: why a head is accepted seldom."""

from drafthead.scripts import options

PLANNER = "plain decoding is faster"


def main(
    *,
    head: options.HeadPath,
    model: options.Model,
    data: options.OwnAnswers,
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
    from drafthead.lab.races.record import describe_run
    from drafthead.lab.reports.run_page import findings_report

    patient = patient_of(model.load(), model.target, head, rows.reading(data, ROW, limit))
    seen = examine(patient)
    findings = CHECKS.findings(seen) | {PLANNER: planner_of(patient)}
    about = {
        **describe_run(model.target, patient.target), "head": str(head), "data": data,
        "evaluation": seen.evaluation.summary(),
    }  # fmt: skip
    options.finish(findings_report(findings, about), output)
