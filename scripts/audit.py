"""`drafthead audit`: does a server write the target's own text, and accept as many drafts?"""

from typing import Annotated

import typer

from drafthead.core.errors import UserError
from drafthead.core.settings import MaxNewTokens
from drafthead.scripts import options


def main(
    *,
    url: Annotated[str, typer.Argument(help="Address of the server: http://HOST:PORT.")],
    model: options.Model,
    head: Annotated[
        str | None,
        options.OfDraft,
        typer.Option(
            help="What the server drafts with: a head, a draft model, an n-gram table, or lookup. "
            "Its counters are then compared with decoding here."
        ),
    ] = None,
    server_model: options.ServerModel = None,
    prompts: options.Questions = None,
    limit: options.PromptLimit = 8,
    max_new_tokens: MaxNewTokens = 64,
    samples: Annotated[
        int, typer.Option(help="Short samples at temperature 1, for each of two prompts.")
    ] = 200,
    output: options.JsonFile = None,
) -> None:
    """Test a running server's text, sampling and acceptance.

    This works with any OpenAI-compatible server (vLLM, SGLang, llama.cpp, drafthead). The model is
    loaded here to check the server's answers: greedy tokens must be the model's own choice, up to
    ties from rounding; short samples must follow its distribution; log-probabilities and the chat
    template must be the same. With --head, the drafts that the server accepts at each position are
    compared with decoding here. Nobody else should use the server meanwhile. If a check fails, a
    likely cause is named and the exit status is 1.
    """
    from drafthead.infer import Decoder
    from drafthead.lab.races.record import describe_run, prompt_ids
    from drafthead.lab.reports.run_page import findings_report
    from drafthead.lab.servers import acceptance  # noqa: F401  # registers its check
    from drafthead.lab.servers.asked import AskedServer
    from drafthead.lab.servers.audit import CHECKS, Audit

    if output is not None and not output.parent.is_dir():
        raise UserError(f"--output {output}: there is no folder {output.parent}")
    target = model.load()
    assert target.tokenizer is not None  # a target read from disk has one
    server = AskedServer(url, server_model, model.target, target.tokenizer)
    ids = prompt_ids(prompts, limit, Decoder(target), max_new_tokens)
    audit = Audit(server, target, ids, max_new_tokens, samples, head)
    findings = CHECKS.findings(audit)
    faults = [name for name, found in findings.items() if found.is_fault]
    verdict = f"FAIL: {', '.join(faults)}" if faults else f"PASS: {url} serves {model.target}"
    about = describe_run(model.target, target) | {"server": url, "head": head}
    options.finish(findings_report(findings, about, [verdict]), output)
    raise typer.Exit(bool(faults))
