"""Files of a head on the Hugging Face hub, with a card."""

import re
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HTTPError

from drafthead.core.errors import UserError, first_line
from drafthead.core.printing import printable
from drafthead.heads.formats.base import Foreign, TargetFacts
from drafthead.heads.formats.loading import build_head, read_foreign

# Of a run's folder; its states, logs and samples of data stay where they are.
FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "acceptance.json", "README.md")
CARD = "README.md"
PLACEHOLDER = re.compile(r"\bOWNER/[\w.-]+")  # the repository, in the card that a build writes
# For `model.generate(..., custom_generate="OWNER/NAME", trust_remote_code=True)`: transformers runs
# this file. It copies the file elsewhere first, so the caller alone knows the folder or repository.
GENERATE_FILE = "custom_generate/generate.py"
GENERATE = '''"""Decode with this draft head, where drafthead is installed."""

import functools
import inspect

from drafthead.infer import Decoder


@functools.lru_cache(maxsize=1)
def decoder_of(model, head):
    return Decoder.from_pretrained(model, draft=head)


def generate(model, **arguments):
    """What model.generate(**arguments) returns, in fewer passes of the model."""
    caller = inspect.currentframe().f_back.f_locals
    decoder = decoder_of(model, caller.get("custom_generate", "{repository}"))
    return model.generate(**arguments, custom_generate=decoder.as_custom_generate())
'''


def push(head: Path, repository: str, private: bool) -> tuple[str, list[str]]:
    """Upload a head's folder; its address there, and the names of its files.

    Raises UserError for what is no folder of a head in safetensors, and as `upload`.
    """
    _, foreign = read_foreign(head, TargetFacts())
    if not foreign.needs_target:
        build_head(foreign, head)
    if not head.is_dir():
        raise UserError(f"{head} is a file: name the folder of the head")
    files: dict[str, Path | bytes] = {
        path.name: path for pattern in FILES for path in sorted(head.glob(pattern))
    }
    if not any(name.endswith(".safetensors") for name in files):
        raise UserError(f"{head} holds no safetensors: convert it with drafthead head import")
    if CARD not in files:
        files[CARD] = card(repository, foreign).encode()
    elif PLACEHOLDER.search(text := (head / CARD).read_text(encoding="utf-8")):
        files[CARD] = PLACEHOLDER.sub(repository, text).encode()
    files[GENERATE_FILE] = generate_file(repository).encode()
    return upload(repository, files, private), sorted(files)


def upload(repository: str, files: dict[str, Path | bytes], private: bool) -> str:
    """The address of a repository that holds the files, as one commit.

    Raises UserError with the hub's reason, or when it cannot be reached.
    """
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]
    hub = HfApi()
    try:
        made = hub.create_repo(repository, private=private, exist_ok=True)
        hub.create_commit(repository, operations, commit_message="Upload a draft head")
    except (HTTPError, OSError, ValueError) as error:
        reason = first_line(error)
        raise UserError(f"{repository} was not uploaded: {printable(reason)}") from error
    return str(made)


def card(repository: str, foreign: Foreign) -> str:
    """A model card in Markdown; what is not known is left out."""
    target = foreign.target.name
    count = sum(tensor.numel() for tensor in foreign.tensors.values() if tensor.is_floating_point())
    named = target or "TARGET"
    of = f" for {target}" if target else ""
    evaluation = foreign.provenance.get("evaluation")
    sections = [
        front_matter(target, foreign.family),
        f"# {repository.split('/')[-1]}",
        f"A draft head{of}, family {foreign.family}, {count / 1e6:.1f} million parameters. It "
        "proposes tokens that the target verifies, so that decoding is faster and the answers are "
        "the target's own.",
        f"```\ndrafthead chat --target {named} --draft {repository}\n```",
        "With transformers, where drafthead is installed:",
        f'```python\nmodel.generate(**inputs, custom_generate="{repository}", '
        "trust_remote_code=True)\n```",
        *([acceptance(evaluation)] if isinstance(evaluation, dict) else []),
    ]
    return "\n\n".join(sections) + "\n"


def generate_file(repository: str) -> str:
    """The text of `GENERATE_FILE` for a head in a repository or folder."""
    return GENERATE.replace("{repository}", repository)


def front_matter(target: str | None, family: str) -> str:
    """The YAML block of a card, which the hub reads.

    A target in a local folder is not named, because the hub does not know it.
    """
    named = target or ""
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", named) and not Path(named).exists()
    base = [f"base_model: {named}", "base_model_relation: adapter"] if is_hub_id else []
    tags = f"tags: [speculative-decoding, draft-head, {family}, custom_generate]"
    return "\n".join(["---", "library_name: drafthead", *base, tags, "---"])


def acceptance(evaluation: dict[str, Any]) -> str:
    """The table of the last evaluation on held-out answers."""
    trees = evaluation.get("tau_tree", {})
    columns = ["chain", *(f"{nodes} nodes" for nodes in trees)]
    values = [f"{tau:.2f}" for tau in (evaluation["tau_chain"], *trees.values())]
    rows = [columns, ["---"] * len(columns), values]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    positions = f"{evaluation['anchors']:,} positions of held-out answers"
    return f"Tokens per pass of the target, greedy, after {positions}:\n\n{table}"
