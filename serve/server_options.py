"""Options of a server; this file imports no server, so that the command line can list them."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from drafthead.core.settings import AtLeastOne, InShell, NotNegative, settings


@settings(kw_only=True)
class Serving:
    """Options for who may ask, and what requests may cost."""

    max_batch: Annotated[
        AtLeastOne,
        Field(description="Answers decoded at a time; a quarter more for clients that have none."),
    ] = 16
    max_queue: Annotated[
        NotNegative, Field(description="Answers that may wait; more are refused (429).")
    ] = 256
    max_wait: Annotated[
        AtLeastOne, Field(description="Seconds that a request may wait for its turn (then 503).")
    ] = 600
    max_body: Annotated[AtLeastOne, Field(description="Most bytes of a request.")] = 4 << 20
    max_kept: Annotated[
        NotNegative, Field(description="Most MiB kept of answers, for prompts that go on.")
    ] = 2048
    max_length: Annotated[
        int | None,
        Field(description="Most tokens of prompt and answer; by default the target's context."),
    ] = None
    cors_origins: Annotated[
        tuple[str, ...],
        InShell("--cors-origin"),
        Field(description="Origin whose pages may ask this server, or *. Repeatable."),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        InShell("--allowed-host"),
        Field(
            description="Name with a dot under which clients know this machine, or *. Repeatable."
        ),
    ] = ()
    drafts_from: Annotated[
        tuple[Path, ...],
        InShell("--drafts-from"),
        Field(
            description="Folder below which POST /v1/drafts may load heads, models and tables. "
            "Repeatable; by default there is none."
        ),
    ] = ()
    record: Annotated[
        Path | None,
        Field(
            description="File to keep answers in, with their prompts, for build --continue; by "
            "default none is kept."
        ),
    ] = None
    max_record: Annotated[AtLeastOne, Field(description="Most MiB of that file.")] = 1024
    model_sampling: Annotated[
        bool,
        Field(
            description="Whether requests without temperature, top_p, top_k or min_p get those of "
            "the model's generation_config.json."
        ),
    ] = False
    prefix_cache: Annotated[
        bool,
        Field(description="Whether prompts go on from what was read for earlier answers."),
    ] = True


@settings
class ServerOptions(Serving):
    """All options of a server."""

    model_name: str  # for clients
    target: str = ""  # its name, for rows of `record`
    other_names: tuple[str, ...] = ()  # of the model, which clients may send too
    api_keys: tuple[str, ...] = ()  # of which requests must bring one
    admin_keys: tuple[str, ...] = ()  # of which requests for other drafts must bring one
    drafts: tuple[str, ...] = ()  # at first
