"""A drafter for a server of other software: files that it reads, and a script that starts it.

The script names the method and the number of drafted tokens, K, itself: nothing is left to guesses
from paths. K follows from what was measured of the head.
"""

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from shutil import copytree
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import cached_file

from drafthead.core.errors import UserError, first_line
from drafthead.core.storage.files import fresh_folder, write_text
from drafthead.core.target.any_target import load_decoder_only, tokenizer_named, whole_folder
from drafthead.core.target.gguf_files import gguf_of, model_folder
from drafthead.core.target.loading import vocabulary_of
from drafthead.heads.base import DraftHead
from drafthead.heads.formats import build_head, read_foreign
from drafthead.heads.formats.base import FORMATS, TargetFacts
from drafthead.heads.formats.checkpoint import local_copy
from drafthead.heads.formats.exporting import export_head
from drafthead.heads.formats.files import CONFIG_FILE, read_json
from drafthead.infer import Target
from drafthead.infer.drafters.history import LONGEST
from drafthead.infer.drafters.store_lookup import load_table
from drafthead.infer.loading.loaded import DEFAULT_CHAIN, NamedDraft, named_draft
from drafthead.lab.servers.vllm_lookup import FOLDER, LookupProposer

SCRIPT, FILES, TARGET = "serve.sh", "head", "target"  # in the folder that is written
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
# What else drafts, by its kind, and what servers call their method.
OTHERS: dict[str, dict[str, str]] = {
    "model": {"vllm": "draft_model", "sglang": "STANDALONE", "llamacpp": "draft-simple"},
    "ngrams": {"vllm": "custom_class"},
    "lookup": {"vllm": "ngram"},
}
LAYOUTS = {"model": "transformers", "ngrams": "ngrams", "lookup": "none"}
# More keys of vLLM's methods: EAGLE-3's code runs P-EAGLE, all tokens in one pass; lookup finds
# matches of the lengths that ours finds.
KEYS: dict[str, dict[str, Any]] = {
    "peagle": {"method": "eagle3", "parallel_drafting": True},
    "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": LONGEST},
    "custom_class": {"model": f"{LookupProposer.__module__}.{LookupProposer.__qualname__}"},
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
OTHER_HELP = (
    "`drafthead build --family eagle3-portable` makes a head that the three servers read, and so "
    "does `drafthead train --init eagle3-portable --target MODEL --config FILE`"
)


@dataclass(frozen=True)
class Served:
    """A drafter that was exported for a server, as its script starts it."""

    server: str
    head: str  # its path, or what else `--draft` takes
    layout: str
    method: str  # the server's name of it
    target: str  # its folder, file or hub id
    tokens: int  # K, drafted after the root
    reason: str  # why so many

    @property
    def model(self) -> str:
        """Return what clients call the model."""
        return Path(self.target).name


def export_named(server: str, name: str, target: str | None, folder: Path) -> Served:
    """Write for a server what `name` drafts with: a head, or what else `--draft` takes.

    `target` may be left out for heads that name theirs. Raises UserError as `export_for`.
    """
    draft = named_draft(name)
    if draft.name == "head":
        path = Path(draft.argument)
        head, facts, loaded = read_head(path, target)
        return export_for(server, head, path, facts, loaded, folder)
    if target is None:
        raise UserError(f"{name} does not name its target: name it with --target")
    return export_other(server, draft, target, folder)


def read_head(path: Path, target: str | None) -> tuple[DraftHead, TargetFacts, Target | None]:
    """A head of any format, what is known of its target, and that, loaded if it is named.

    Raises UserError for what cannot be read.
    """
    loaded = load_decoder_only(target, "float32", "cpu") if target else None
    facts = TargetFacts.of(loaded, target) if loaded else TargetFacts()
    _, foreign = read_foreign(path, facts)
    return build_head(foreign, path, loaded), facts.completed(foreign.target), loaded


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
    check_server(server)
    if facts.name is None:
        raise UserError(f"{path} does not name its target: name it with --target")
    tokens, reason = drafted_tokens(head, facts.name)
    with fresh_folder(folder) as temporary:
        layout = exported(server, head, facts, target, temporary / FILES)
        method = METHODS[server][layout] or kind_of(temporary / FILES)
        served = Served(server, str(path), layout, method, facts.name, tokens, reason)
        write_script(served, temporary)
    return served


def export_other(server: str, draft: NamedDraft, target: str, folder: Path) -> Served:
    """Copy what drafts without being a head into a folder, and write its `serve.sh`.

    Raises UserError when the server has no method for it, and as `drafter_files`.
    """
    check_server(server)
    method = OTHERS.get(draft.name, {}).get(server)
    if method is None:
        able = ", ".join(kind for kind, servers in OTHERS.items() if server in servers)
        corpus = "; `data index --corpus` writes what SGLang looks texts up in"
        raise UserError(
            f"{server} cannot draft with {draft}: beside heads it takes what --draft calls {able}"
            f"{corpus if server == 'sglang' else ''}"
        )
    with fresh_folder(folder) as temporary:
        if draft.argument:
            copytree(drafter_files(draft, target), temporary / FILES)
            whole_folder(draft.argument, temporary / FILES)
        name, reason = draft.argument or draft.name, "the default: nothing was measured"
        layout = LAYOUTS[draft.name]
        served = Served(server, name, layout, method, target, DEFAULT_CHAIN, reason)
        write_script(served, temporary)
    return served


def drafter_files(draft: NamedDraft, target: str) -> Path:
    """The folder of a draft model or a table of n-grams.

    Raises UserError where there is none, and for a table of other tokens than the target's.
    """
    folder = local_copy(Path(model_folder(draft.argument)))
    if draft.name == "ngrams":
        load_table(folder, vocabulary_of(tokenizer_named(target)))
    elif not (folder / CONFIG_FILE).is_file():
        raise UserError(f"{folder} has no {CONFIG_FILE}: name the folder of a whole model")
    return folder


def check_server(server: str) -> None:
    """Raise UserError for a server that is not known."""
    if server not in METHODS:
        raise UserError(f"--for {server}: known servers are {', '.join(METHODS)}")


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
    if server == "vllm" and head.family == "eagle":
        # It drops the bias, and takes its key for one of attention, which no file then fills.
        lacking = {"fc_bias": (False,)}
    if server == "llamacpp" and layout == "speculators" and head.family == "eagle3":
        raise UserError("of the layout speculators it reads DSpark alone")
    has = {option: getattr(config, option, able[0]) for option, able in lacking.items()}
    lacks = [f"head.{name} {value!r}" for name, value in has.items() if value not in lacking[name]]
    if lacks:
        raise UserError(f"its reader of {layout} lacks {', '.join(lacks)}")
    if server == "llamacpp" and layout == "eagle3-vllm" and len(config.taps) != 3:
        raise UserError(f"its reader of {layout} takes three layers, not head.taps {config.taps}")


def kind_of(files: Path) -> str:
    """The method that files of speculators name."""
    return str(read_json(files / CONFIG_FILE)["speculators_model_type"])


# How many tokens are drafted


def drafted_tokens(head: DraftHead, target: str) -> tuple[int, str]:
    """Return how many tokens to draft after the root, and the reason in words.

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
        f"this gives the most tokens per weight that is read, {tokens[best]:.2f} tokens per pass. "
        f"On held-out answers the first {head.depth} drafted tokens were right in "
        f"{', '.join(f'{p:.0%}' for p in right)} of {places} places, and each reads {share:.0%} of "
        "the target's weights. The server was not timed: use fewer for large batches"
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


def write_script(served: Served, folder: Path) -> None:
    """Write `serve.sh`, and for servers that read no GGUF file the target as they do."""
    write_text(folder / SCRIPT, script(served))
    if served.server != "llamacpp":
        whole_folder(served.target, folder / TARGET)


def target_path(served: Served) -> str:
    """The target's folder or hub id as the shell reads it."""
    return f'"$HERE/{TARGET}"' if gguf_of(served.target) else quote(served.target)


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
    method, tokens = served.method, served.tokens
    drafts = {"method": method, "num_speculative_tokens": tokens, **KEYS.get(method, {})}
    files = method not in ("ngram", "custom_class")
    spoken = with_files(drafts, "model") if files else quote(json.dumps(drafts))
    table = [f"  --additional-config {with_files({}, FOLDER)} \\"]
    return [
        f'exec "${{VLLM:-vllm}}" serve {target_path(served)} \\',
        f'  --served-model-name {quote(served.model)} --port "${{PORT:-8000}}" \\',
        *(table if method == "custom_class" else []),
        f'  --speculative-config {spoken} ${{OPTIONS:-}} "$@"',
    ]


def with_files(settings: dict[str, Any], key: str) -> str:
    """Settings as JSON for the shell, the folder of the drafter's files under one more key."""
    begun = json.dumps({**settings, key: ""}).removesuffix('"}')
    return f"'{begun}'\"$HERE/{FILES}\"'\"}}'"


def sglang_command(served: Served) -> list[str]:
    """SGLang's command: chains, since its trees are not those of ours."""
    chains = [
        f"  --speculative-num-steps {served.tokens} --speculative-eagle-topk 1 \\",
        f"  --speculative-num-draft-tokens {served.tokens + 1} \\",
    ]
    return [
        f'exec "${{PYTHON:-python3}}" -m sglang.launch_server --model-path '
        f"{target_path(served)} \\",
        f'  --served-model-name {quote(served.model)} --port "${{PORT:-8000}}" --enable-metrics \\',
        f"  --speculative-algorithm {served.method} \\",
        *([] if served.method.startswith("D") else chains),  # blocks are as long as the head's
        f'  --speculative-draft-model-path "$HERE/{FILES}" ${{OPTIONS:-}} "$@"',
    ]


def llamacpp_commands(served: Served) -> list[str]:
    """llama.cpp's commands: its own converter makes the GGUF files, the first time."""
    file = gguf_of(served.target)
    folder = quote(str(configuration_folder(served.target)))
    convert = (
        '"${PYTHON:-python3}" "${LLAMA_CPP:?is the folder of its sources}/convert_hf_to_gguf.py"'
    )
    beside = "" if served.layout == LAYOUTS["model"] else f"--target-model-dir {folder} "
    lines = converting(f'{convert} "$HERE/{FILES}" {beside}--outtype bf16', "head")
    model = quote(str(file))
    if file is None:
        model = '"$HERE/target.gguf"'
        lines += converting(f"{convert} {folder} --outtype bf16", "target")
    return [
        *lines,
        "# One answer at a time: with slots that share a cache, its own choice, hardly a draft is",
        "# accepted where several ask. OPTIONS='--parallel 4 -c 4096' gives each a part.",
        f'exec "${{LLAMA_SERVER:-llama-server}}" --model {model} --alias {quote(served.model)} \\',
        f'  --port "${{PORT:-8000}}" --metrics --spec-type {served.method} \\',
        f'  --spec-draft-model "$HERE/head.gguf" --spec-draft-n-max {served.tokens} \\',
        '  --parallel 1 ${OPTIONS:-} "$@"',
    ]


def converting(command: str, name: str) -> list[str]:
    """The lines that make a GGUF file, unless it is there; one that was cut short is not taken."""
    return [
        f'if [ ! -f "$HERE/{name}.gguf" ]; then',
        f'  {command} --outfile "$HERE/{name}.part.gguf"',
        f'  mv "$HERE/{name}.part.gguf" "$HERE/{name}.gguf"',
        "fi",
    ]


def configuration_folder(target: str) -> Path:
    """The folder of a target's configuration and tokenizer, in the hub's cache for a hub id."""
    folder = Path(model_folder(target))
    return folder if folder.is_dir() else Path(str(cached_file(target, CONFIG_FILE))).parent


COMMANDS = {"vllm": vllm_command, "sglang": sglang_command, "llamacpp": llamacpp_commands}
