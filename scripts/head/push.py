"""`drafthead head push`: a trained head on the Hugging Face hub, with a card."""

from typing import Annotated

import typer

from drafthead.scripts import options


def main(
    head: options.HeadPath,
    repository: Annotated[str, typer.Argument(help="Repository on the hub: OWNER/NAME.")],
    private: Annotated[bool, typer.Option(help="Make a new repository private.")] = False,
) -> None:
    """Upload a head to the Hugging Face hub: --draft OWNER/NAME then takes it everywhere.

    A folder without README.md gets a card, with what is known of target, training and acceptance.
    All files arrive together or not at all. config.json tells how the head was trained, with the
    paths of the data: look at it before. Log in first: hf auth login.
    """
    from drafthead.heads.formats.uploading import push

    address, files = push(head, repository, private)
    print(f"{address}: {', '.join(files)}")
