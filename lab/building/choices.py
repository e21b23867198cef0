"""The choices of a build; this file imports no torch, so that the command line can list options."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from shlex import join, split
from typing import Annotated

from pydantic import Field

from drafthead.core.settings import MaxNewTokens, Refusing, Seed, settings
from drafthead.core.storage.names import refuse_missing_data, refuse_missing_head

FILES = [Path(file.name) for file in resources.files("drafthead.configs").iterdir()]
FAMILIES = ", ".join(sorted(f.stem for f in FILES if f.suffix == ".yaml" and "demo" not in f.stem))


@settings(kw_only=True)
class BuildOptions:
    """Options of what a build makes, and from what."""

    prompts: Annotated[
        tuple[str, ...],
        Refusing(refuse_missing_data),
        Field(
            description="Prompts like those of your users: a file, folder or data set. Repeatable. "
            "Without it, the model invents prompts."
        ),
    ] = ()
    family: Annotated[
        str,
        Field(
            description=f"Kind of head: {FAMILIES}. vLLM, SGLang and llama.cpp can all read "
            "eagle3-portable."
        ),
    ] = "eagle3"
    init_from: Annotated[
        str | None,
        Refusing(refuse_missing_head),
        Field(
            description="Start from this head of the same --family, such as that of the model that "
            "yours is fine-tuned from: a folder, OWNER/NAME on the hub, or smollm2-eagle3."
        ),
    ] = None
    max_new_tokens: MaxNewTokens = 192
    seed: Annotated[
        Seed, Field(description="Random seed for invented prompts and for the held-out split.")
    ] = 0
    compile: Annotated[
        bool | None,
        Field(
            description="For GPUs: compile layers, which takes minutes. By default on from a "
            "budget of 10 minutes where there is a GPU."
        ),
    ] = None


@settings(kw_only=True)
class Choices(BuildOptions):
    """The user's choices; they decide everything else, with the speed of the machine."""

    target: str
    dtype: str
    device: str
    minutes: float

    def command(self, verb: str, options: Mapping[str, object]) -> str:
        """The command of a verb for the target, as people write it; None and "auto" are left out.

        A list is an option for each of its values, True and False are switches.
        """
        words = ["drafthead", *split(verb)]
        named = {"target": self.target, "dtype": self.dtype, "device": self.device, **options}
        for name, given in named.items():
            for value in given if isinstance(given, list) else [given]:
                option = name.replace("_", "-")
                if isinstance(value, bool):
                    words.append(f"--{option}" if value else f"--no-{option}")
                elif value not in (None, "auto"):
                    words += [f"--{option}", str(value)]
        return join(words)
