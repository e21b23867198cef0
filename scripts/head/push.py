"""`drafthead head push`: a trained head on the Hugging Face hub, with a card."""

from typing import Annotated

import typer

from drafthead.scripts import options


def main(
    head: options.HeadPath,
    repository: Annotated[str, typer.Argument(help="Repository on the hub: OWNER/NAME.")],
    private: Annotated[bool, typer.Option(help="Make a new repository private.")] = False,
) -> None:
    """Upload a head to the Hugging Face hub, with a card.

    Everybody can then use --draft OWNER/NAME. The model card is written if the folder has no
    README.md: base model, family, and measured tau. custom_generate/generate.py is added, so that
    transformers can decode with the head. All files are uploaded in one commit. config.json
    contains the training settings with the paths of your data, so look at it first. Log in with: hf
    auth login.
    """
    from drafthead.heads.formats.uploading import push

    address, files = push(head, repository, private)
    print(f"{address}: {', '.join(files)}")
