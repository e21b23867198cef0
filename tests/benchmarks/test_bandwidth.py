"""What a pass must read, and how fast memory is copied."""

import bandwidth
import torch
from bandwidth import copy_bandwidth, weight_bytes
from tiny import llama_config
from transformers import LlamaForCausalLM

from drafthead.core.target.target import Target

CPU = torch.device("cpu")


def test_copying_is_as_fast_as_memory_can_be(monkeypatch) -> None:
    monkeypatch.setattr(bandwidth, "BUFFER", 2**25)
    assert 1e8 < copy_bandwidth(CPU) < 5e12


def test_a_pass_reads_shared_embeddings_whole_and_others_by_row() -> None:
    size, vocab = 8, 32
    config = llama_config(
        vocab_size=vocab, hidden_size=size, num_hidden_layers=1, num_attention_heads=2
    )
    layers = 4 * size * size + 3 * size * 16 + 3 * size  # projections, MLP, norms
    for tied, table in ((True, vocab * size), (False, vocab * size + 5 * size)):
        config.tie_word_embeddings = tied
        target = Target(LlamaForCausalLM(config))
        buffers = sum(buffer.nbytes for buffer in target.model.buffers())
        assert weight_bytes(target, tokens=5) == 4 * (layers + table) + buffers
