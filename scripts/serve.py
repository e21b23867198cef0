"""`drafthead serve`: a server with OpenAI's endpoints, for many clients at a time."""

import logging
import os
import socket
import time
from ipaddress import ip_address
from itertools import count, takewhile
from pathlib import Path
from typing import Annotated

import typer

from drafthead.core.errors import UserError
from drafthead.core.printing import visible
from drafthead.core.settings import CompileSwitch
from drafthead.scripts import options
from drafthead.serve.server_options import ServerOptions, Serving

logger = logging.getLogger(__name__)
KEY = "DRAFTHEAD_API_KEY"


def main(
    *,
    model: options.Model,
    drafting: options.Drafting,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar=KEY, help="Key that requests must bring, one of several. Repeatable."),
    ] = None,
    admin_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that requests for other drafts must bring instead of an --api-key. "
            "Repeatable."
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of the model for clients, by default that of --target. Repeatable: answers "
            "tell the first."
        ),
    ] = None,
    serving: Serving,
    grace: Annotated[
        int, typer.Option(help="Seconds to finish running answers after SIGTERM or Ctrl-C.", min=0)
    ] = 30,
    compile: CompileSwitch = None,
) -> None:
    """Serve a model with OpenAI's API, metrics and a chat page.

    The page is at /, metrics for Prometheus are at /metrics. Without --draft, decoding is plain. On
    Ctrl-C or SIGTERM the server refuses new requests and finishes running answers (see --grace).
    """
    # An empty variable of the environment counts as none for typer.
    keys = [os.environ[KEY]] if not api_key and KEY in os.environ else api_key or []
    if not all(key.strip() for key in [*keys, *(admin_key or ())]):
        raise UserError(f"the API key is empty: give --api-key or {KEY} a value, or unset it")
    refuse_taken(host, port)  # before anything is loaded
    use_log_lines()
    if not keys and not is_loopback(host):
        logger.warning("anyone who can reach %s can use this server: set --api-key", host)
    with options.starting(model):
        from drafthead.serve.app import make_app
        from drafthead.serve.decode_loop import spare_rows
        from drafthead.serve.listening import listen

        decoder = drafting.decoder(model, compile)
    name, *others = served_model_name or (Path(model.target).name, model.target)
    drafts = tuple(drafting.draft or ())
    served = ServerOptions(
        name, model.target, tuple(others), tuple(keys), tuple(admin_key or ()), drafts,
        **vars(serving),
    )  # fmt: skip
    app = make_app(decoder, served)
    if compile:  # before the first answer, not in the middle of it
        decoder.warm_up(batch_sizes=sizes_up_to(serving.max_batch + spare_rows(serving.max_batch)))
    listen(app, host, port, grace)


class LogLines(logging.Formatter):
    """Lines with their times in UTC, in which nothing that a client sends begins another line."""

    converter = staticmethod(time.gmtime)
    default_time_format, default_msec_format = "%Y-%m-%dT%H:%M:%S", "%s.%03dZ"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's name)
        """A message with names for characters that are not printed."""
        record.message = visible(record.message, besides="")
        return super().formatMessage(record)


def use_log_lines() -> None:
    """Give the lines of all loggers their times."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(LogLines("%(asctime)s %(message)s"))


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
