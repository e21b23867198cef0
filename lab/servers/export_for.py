"""A head for a server of other software: the layout that it reads, and a script that starts it.

The script names the method and the number of drafted tokens, K, itself: nothing is left to guesses
from paths. K follows from what was measured of the head.
"""

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import cached_file

from drafthead.heads.base import DraftHead
from drafthead.heads.errors import UserError, first_line
from drafthead.heads.formats.base import FORMATS, TargetFacts
from drafthead.heads.formats.exporting import export_head
from drafthead.heads.formats.files import CONFIG_FILE, read_json
from drafthead.heads.storage.files import fresh_folder, write_text
from drafthead.heads.target.gguf_files import gguf_of, model_folder
from drafthead.heads.target.target import Target

SCRIPT, FILES = "serve.sh", "head"  # in the folder that is written
DEFAULT_K = 3  # of a head that drafts token by token and was not measured: vLLM's and llama.cpp's
ONE_BY_ONE = ("eagle", "eagle3")  # families of which each drafted token costs a pass

# The layouts that a server reads, the best first, and what it calls their method.
METHODS: dict[str, dict[str, str]] = {
    "vllm": {
        "eagle3-vllm": "eagle3",
        "eagle": "eagle",
        "dflash": "dflash",
        "speculators": "",  # its files say which: see `kind_of`
        "vllm-medusa": "medusa",
    },
    "sglang": {
        "eagle3-sglang": "EAGLE3",
        "eagle": "EAGLE",
        "dflash": "DFLASH",
        "dspark": "DSPARK",
    },
    "llamacpp": {
        "eagle3-vllm": "draft-eagle3",
        "dflash": "draft-dflash",
        "dspark": "draft-dspark",
        "speculators": "draft-dspark",
    },
}
# Options of heads that llama.cpp b11434 lacks, though the layout has them: it drops `norm_output`
# without a word, and its converter ends at the others. By layout.
LLAMACPP: dict[str, dict[str, tuple[Any, ...]]] = {
    "eagle3-vllm": {
        "num_layers": (1,),
        "tap_norm": ("none", "joint"),
        "norm_feedback": (False,),
        "qk_norm": (False,),
        "attention_bias": (False,),
    },
    "dflash": {"attention_bias": (False,)},
    "dspark": {"correction": ("markov",), "attention_bias": (False,)},
    "speculators": {"correction": ("markov",), "attention_bias": (False,)},
}
# vLLM 0.32 builds P-EAGLE without these norms.
PEAGLE = {"tap_norm": ("none", "joint"), "norm_feedback": (False,)}
# What would help, by family.
HELP = {
    "parallel": "With head.tap_norm false, head.root_feature false, a head.mask_token and no last "
    "layer among head.taps the three servers read such heads",
    "mtp": "Its server reads it in the target's own files: `drafthead head export --format mtp` "
    "writes it under the names that it has there",
}
OTHER_HELP = "`drafthead train --init eagle3-portable` trains a head that the three servers read"


@dataclass(frozen=True)
class Served:
    """What a script starts: a head that was exported for a server."""

    server: str
    head: str  # its path
    layout: str
    method: str  # the server's name of it
    target: str  # its folder, file or hub id
    tokens: int  # K, drafted after the root
    reason: str  # why so many

    @property
    def model(self) -> str:
        """What clients call the model."""
        return Path(self.target).name


def export_for(
    server: str,
    head: DraftHead,
    path: Path,
    facts: TargetFacts,
    target: Target | None,
    folder: Path,
) -> Served:
    """Write a head into a folder, in the layout that a server reads best, and its `serve.sh`.

    `path` is the head's own; `facts` name its target, whose configuration must be readable here,
    and `target` is as in `export_head`. Raises UserError when no layout that the server reads can
    express the head: the reason for each, and what would help.
    """
    if server not in METHODS:
        raise UserError(f"--for {server}: known servers are {', '.join(METHODS)}")
    if facts.name is None:
        raise UserError(f"{path} does not name its target: name it with --target")
    tokens, reason = drafted_tokens(head, facts.name)
    with fresh_folder(folder) as temporary:
        layout = exported(server, head, facts, target, temporary / FILES)
        method = METHODS[server][layout] or kind_of(temporary / FILES)
        served = Served(server, str(path), layout, method, facts.name, tokens, reason)
        write_text(temporary / SCRIPT, script(served))
    return served


def exported(
    server: str, head: DraftHead, facts: TargetFacts, target: Target | None, folder: Path
) -> str:
    """Write a head in the first layout that a server reads and that can express it: its name."""
    reasons = []
    for layout in METHODS[server]:
        if head.family not in FORMATS[layout].families:
            continue
        try:
            refuse_lacking(server, layout, head)
            export_head(head, facts, target, layout, folder)
            return layout
        except UserError as error:
            reasons.append(str(error))
    known = sorted({family for layout in METHODS[server] for family in FORMATS[layout].families})
    why = "; ".join(reasons) or f"it reads heads of the families {', '.join(known)} alone"
    raise UserError(
        f"{server} cannot serve this head of the family {head.family}: {why}. "
        f"{HELP.get(head.family, OTHER_HELP)}"
    )


def refuse_lacking(server: str, layout: str, head: DraftHead) -> None:
    """Raise UserError for what a layout can express and a server's reader of it lacks."""
    config: Any = head.config
    lacking: dict[str, tuple[Any, ...]] = LLAMACPP[layout] if server == "llamacpp" else {}
    if server == "vllm" and head.family == "eagle3" and config.mask_token is not None:
        lacking = PEAGLE
    if server == "llamacpp" and layout == "speculators" and head.family == "eagle3":
        raise UserError("of the layout speculators it reads DSpark alone")
    for option, able in lacking.items():
        if (value := getattr(config, option, able[0])) not in able:
            raise UserError(f"its reader of {layout} lacks head.{option} {value!r}")
    if server == "llamacpp" and layout == "eagle3-vllm" and len(config.taps) != 3:
        raise UserError(f"its reader of {layout} takes three layers, not head.taps {config.taps}")


def kind_of(files: Path) -> str:
    """The method that files of speculators name."""
    return str(read_json(files / CONFIG_FILE)["speculators_model_type"])


# How many tokens are drafted


def drafted_tokens(head: DraftHead, target: str) -> tuple[int, str]:
    """How many tokens to draft after the root, and the reason in words.

    A pass that drafts all tokens drafts all of them. Where each costs a pass of the head, as many
    as make most tokens for the weights read: the time of decoding for one user on most machines.
    """
    if head.family not in ONE_BY_ONE or getattr(head.config, "mask_token", None) is not None:
        return head.depth, "a pass of the head drafts as many"
    counts = head.path_counts or {}
    if not (places := counts.get((), 0)):
        return min(DEFAULT_K, head.depth), (
            "the default of this script: how often the head is right was not measured, which "
            "`drafthead head evaluate --save-acceptance` does"
        )
    share = weights_read(head, target)
    right = [counts.get((0,) * depth, 0) / places for depth in range(1, head.depth + 1)]
    tokens = [1 + sum(right[:drafted]) for drafted in range(1, head.depth + 1)]
    speeds = [each / (1 + share * number) for number, each in enumerate(tokens, start=1)]
    best = speeds.index(max(speeds))
    return best + 1, (
        f"most tokens for the weights read. Of {places} held-out places (acceptance.json) the "
        f"first {head.depth} drafted tokens were right at {', '.join(f'{p:.0%}' for p in right)}: "
        f"{tokens[best]:.2f} tokens a pass. Each drafted token reads {share:.0%} of what a pass "
        "of the target reads. Large batches want fewer"
    )


def weights_read(head: DraftHead, target: str) -> float:
    """The weights that a drafted token reads, as a share of those that a pass of the target reads.

    Raises UserError when the target's configuration cannot be read.
    """
    try:
        config = AutoConfig.from_pretrained(model_folder(target))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"cannot read the sizes of the target {target} ({first_line(error)}): name it with "
            "--target"
        ) from error
    output = model.get_output_embeddings().weight
    tied = output is model.get_input_embeddings().weight
    looked_up = 0 if tied else model.get_input_embeddings().weight.numel()
    own = sum(p.numel() for name, p in head.named_parameters() if "embed" not in name)
    own += output.numel() if head.family == "eagle" else 0  # which guesses with the target's
    return own / (sum(p.numel() for p in model.parameters()) - looked_up)


# The script


def script(served: Served) -> str:
    """The text of `serve.sh`."""
    about = textwrap.wrap(
        f"{served.head} with {served.target}, in the layout {served.layout}. K is {served.tokens}: "
        f"{served.reason}.",
        96,
        break_long_words=False,
        break_on_hyphens=False,
    )
    lines = [
        "#!/bin/sh",
        *(f"# {line}" for line in about),
        "# PORT (8000) and OPTIONS may be set in the environment; arguments go to the server, too.",
        "set -eu",
        'HERE=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)',
        *COMMANDS[served.server](served),
    ]
    return "\n".join(lines) + "\n"


def vllm_command(served: Served) -> list[str]:
    """vLLM's command."""
    peagle = served.method == "peagle"  # which EAGLE-3's code runs, all tokens in one pass
    drafts = {
        "method": "eagle3" if peagle else served.method,
        "num_speculative_tokens": served.tokens,
        **({"parallel_drafting": True} if peagle else {}),
    }
    spliced = f'{json.dumps(drafts)[:-1]}, "model": "'
    return [
        f'exec "${{VLLM:-vllm}}" serve {quote(str(model_folder(served.target)))} \\',
        f'  --served-model-name {quote(served.model)} --port "${{PORT:-8000}}" \\',
        f'  --speculative-config \'{spliced}\'"$HERE/{FILES}"\'"}}\' ${{OPTIONS:-}} "$@"',
    ]


def sglang_command(served: Served) -> list[str]:
    """SGLang's command: chains, since its trees are not those of ours."""
    chains = [
        f"  --speculative-num-steps {served.tokens} --speculative-eagle-topk 1 \\",
        f"  --speculative-num-draft-tokens {served.tokens + 1} \\",
    ]
    return [
        f'exec "${{PYTHON:-python3}}" -m sglang.launch_server --model-path '
        f"{quote(str(model_folder(served.target)))} \\",
        f'  --served-model-name {quote(served.model)} --port "${{PORT:-8000}}" --enable-metrics \\',
        f"  --speculative-algorithm {served.method} \\",
        *(chains if served.method.startswith("EAGLE") else []),  # blocks are as long as the head's
        f'  --speculative-draft-model-path "$HERE/{FILES}" ${{OPTIONS:-}} "$@"',
    ]


def llamacpp_commands(served: Served) -> list[str]:
    """llama.cpp's commands: its own converter makes the GGUF files, the first time."""
    file = gguf_of(served.target)
    folder = quote(str(configuration_folder(served.target)))
    convert = (
        '"${PYTHON:-python3}" "${LLAMA_CPP:?is the folder of its sources}/convert_hf_to_gguf.py"'
    )
    lines = [
        f'[ -f "$HERE/head.gguf" ] || {convert} "$HERE/{FILES}" \\',
        f'  --target-model-dir {folder} --outtype bf16 --outfile "$HERE/head.gguf"',
    ]
    model = quote(str(file))
    if file is None:
        model = '"$HERE/target.gguf"'
        lines.append(f"[ -f {model} ] || {convert} {folder} --outtype bf16 --outfile {model}")
    return [
        *lines,
        f'exec "${{LLAMA_SERVER:-llama-server}}" --model {model} --alias {quote(served.model)} \\',
        f'  --port "${{PORT:-8000}}" --metrics --spec-type {served.method} \\',
        f'  --spec-draft-model "$HERE/head.gguf" --spec-draft-n-max {served.tokens} \\',
        '  ${OPTIONS:-} "$@"',
    ]


def configuration_folder(target: str) -> Path:
    """The folder of a target's configuration and tokenizer, in the hub's cache for a hub id."""
    folder = Path(model_folder(target))
    return folder if folder.is_dir() else Path(str(cached_file(target, CONFIG_FILE))).parent


COMMANDS = {"vllm": vllm_command, "sglang": sglang_command, "llamacpp": llamacpp_commands}
