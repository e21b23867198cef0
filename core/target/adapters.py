"""Adapters of PEFT by name: the base model that they belong to, and the tokens that they add."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import CONFIG_NAME, cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from drafthead.core.errors import UserError

WEIGHTS_NAME = "adapter_model.safetensors"
TRAINED_TOKENS = "trainable_token_indices"  # a key of PEFT: rows of a table that were trained


def base_of_adapter(source: str | Path) -> str | None:
    """The name of the base model of an adapter's folder or hub id; None for a model's own.

    A folder that holds a model and an adapter for it is the model's own. Raises UserError for an
    adapter that names no base model.
    """
    file = find_adapter_config_file(str(source))
    if file is None or (Path(source) / CONFIG_NAME).exists():
        return None
    base = read_config(file).get("base_model_name_or_path")
    if not isinstance(base, str):
        raise UserError(f"{file} names no model under base_model_name_or_path: write it there")
    return base


def read_config(file: str) -> dict[str, Any]:
    """The configuration of an adapter; raises UserError for what is none."""
    try:
        config = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} must hold an object, found {type(config).__name__}")
    return config


def add_adapter(model: PreTrainedModel, source: str | Path) -> None:
    """Load an adapter into its base model, whose tables first get rows for the tokens that it adds.

    Raises UserError when the adapter lacks the rows of a table for these tokens.
    """
    before = len(cast(torch.Tensor, model.get_input_embeddings().weight))
    rows = rows_by_table(model, source)
    count = max((max(numbers) + 1 for numbers in rows.values() if numbers), default=before)
    if count > before:
        for name, table in tables(model).items():
            if not {*range(before, count)} <= {*rows[name]} and not is_tied(model, table):
                raise UserError(
                    f"the adapter {source} adds tokens {before} to {count - 1}, but holds no rows "
                    f"of {name} for them: save it with save_embedding_layers=True"
                )
        model.resize_token_embeddings(count, mean_resizing=False)
    model.load_adapter(str(source))


def tables(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The input embeddings and the output head of a model, by the last part of their names."""
    both = (model.get_input_embeddings(), model.get_output_embeddings())
    found = ((name.rpartition(".")[2], module) for name, module in model.named_modules())
    return {name: module for name, module in found if any(module is table for table in both)}


def is_tied(model: PreTrainedModel, table: nn.Module) -> bool:
    """Whether an output head is the table of input embeddings, which brings the rows."""
    embeddings = model.get_input_embeddings()
    return table is not embeddings and table.weight is embeddings.weight


def rows_by_table(model: PreTrainedModel, source: str | Path) -> dict[str, Sequence[int]]:
    """The rows of each table that an adapter holds, whole tables or single trained rows."""
    config = read_config(str(find_adapter_config_file(str(source))))
    names, given = [*tables(model)], config.get(TRAINED_TOKENS) or {}
    if not isinstance(given, dict):  # a list is of the input embeddings
        given = {names[0]: given}
    trained = {name.rpartition(".")[2]: numbers for name, numbers in given.items()}
    rows: dict[str, Sequence[int]] = {name: trained.get(name, []) for name in names}
    file = cached_file(source, WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    if file is not None:
        with safe_open(file, "pt") as tensors:
            # Such as `base_model.model.lm_head.base_layer.weight`; not the factors of LoRA.
            for key in tensors.keys():  # noqa: SIM118  # it is no mapping
                for name in rows:
                    if f".{name}." in key and key.endswith(".weight") and ".lora_" not in key:
                        rows[name] = range(tensors.get_slice(key).get_shape()[0])
    return rows
