"""`drafthead serve`: a server with OpenAI's endpoints, for many clients at a time."""

import logging
import os
import socket
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drafthead.core.errors import UserError
from drafthead.scripts import options

if TYPE_CHECKING:
    from drafthead.serve.app import ServerOptions

logger = logging.getLogger(__name__)
KEY = "DRAFTHEAD_API_KEY"


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Who may ask, and what requests may cost."""

    max_batch: Annotated[
        int, typer.Option(help="Answers decoded at a time.", callback=options.at_least_one)
    ] = 16
    max_queue: Annotated[
        int, typer.Option(help="Answers that may wait; more are refused (429).", min=0)
    ] = 256
    max_length: Annotated[
        int | None,
        typer.Option(help="Most tokens of prompt and answer; by default the target's context."),
    ] = None
    max_body: Annotated[
        int, typer.Option(help="Most bytes of a request.", callback=options.at_least_one)
    ] = 4 << 20
    max_kept: Annotated[
        int, typer.Option(help="Most MiB kept of answers, for prompts that go on.", min=0)
    ] = 2048
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin whose pages may ask this server, or *. Repeatable."),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name with a dot under which clients know this machine, or *. Repeatable."
        ),
    ] = None
    prefix_cache: Annotated[
        bool, typer.Option(help="Whether prompts go on from what was read for earlier answers.")
    ] = True

    def of(self, target: str, name: str | None, api_key: str | None) -> "ServerOptions":
        """The options of a server of a target; for clients its `name`, or that of the target."""
        from drafthead.serve.app import ServerOptions

        return ServerOptions(
            model_name=name or Path(target).name,
            other_name=None if name else target,
            max_batch=self.max_batch,
            max_queue=self.max_queue,
            max_body=self.max_body,
            max_length=self.max_length,
            max_kept=self.max_kept,
            api_key=api_key,
            cors_origins=tuple(self.cors_origin or ()),
            allowed_hosts=tuple(name.lower() for name in self.allowed_host or ()),
            prefix_cache=self.prefix_cache,
        )


def main(
    *,
    model: options.Model,
    drafting: options.Drafting,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar=KEY, help="Key that requests must bring."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model for clients; by default that of --target.")
    ] = None,
    serving: Serving,
    grace: Annotated[
        int, typer.Option(help="Seconds that running answers have after SIGTERM or Ctrl-C.", min=0)
    ] = 30,
    compile: options.CompileSwitch = None,
) -> None:
    """Serve a model with a head to OpenAI's clients, with vLLM's metrics at /metrics.

    Without --draft decoding is plain. A page to chat with is at /. Ctrl-C or SIGTERM ends the
    server once running answers have ended.
    """
    try:
        from drafthead.serve.app import listen, make_app
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'drafthead[serve]'") from error

    # An empty variable of the environment counts as none for typer.
    if (os.environ.get(KEY) if api_key is None else api_key.strip()) == "":
        raise UserError(f"the API key is empty: give --api-key or {KEY} a value, or unset it")
    refuse_taken(host, port)  # before anything is loaded
    if api_key is None and not is_loopback(host):
        logger.warning("everybody who reaches %s may ask this server: set --api-key", host)
    decoder = drafting.decoder(model, compile)
    served = serving.of(model.target, served_model_name, api_key)
    app = make_app(decoder, served)
    if compile:  # before the first answer, not in the middle of it
        decoder.warm_up(batch_sizes=sizes_up_to(serving.max_batch))
    listen(app, host, port, grace)


def sizes_up_to(most: int) -> list[int]:
    """Sizes of batches of which others know what steps cost: 1, 4, 16, ... and the largest."""
    return [*takewhile(lambda size: size < most, (4**power for power in count())), most]


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches a host."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def refuse_taken(host: str, port: int) -> None:
    """Raise UserError where nobody can listen at an address."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        raise UserError(
            f"cannot listen at {host} port {port} ({error.strerror}): choose another --port or "
            "--host"
        ) from error
