"""Draft heads by our kernels: what torch's modules guess, from the weights as they are."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny import random_prompts
from wide import model_of

from drafthead.backends.cpu import packed_target
from drafthead.backends.cpu.kernels import library, operations
from drafthead.backends.cpu.packed_heads import PackedAdding, packed_head
from drafthead.backends.cpu.packed_modules import PackedLinear
from drafthead.backends.cpu.substitutions import replacement_of
from drafthead.core.kv_cache.column_cache import visible_columns
from drafthead.core.target.target import Target
from drafthead.heads.families.head_drafter import HeadDrafter, drafter_for
from drafthead.heads.growing import dynamic
from drafthead.infer.decoder import decoder_for

pytestmark = pytest.mark.skipif(not library.loaded(), reason="there are no kernels here")
# Rounding to bfloat16 in another order, and products of whole numbers: shares of the logits' size.
ROUNDING, IN_INT8 = 0.02, 0.06
OTHER_FORMS = {  # of families that have several
    "eagle": [{"num_layers": 2}],
    "eagle3": [{"num_layers": 2, "qk_norm": True}, {"norm_before_residual": True, "window": 6}],
    "hydra": [{"prefix_layer": False}],
    "medusa": [{"output": "shared"}],
    "parallel": [{"correction": "gated", "draft_vocab_size": 32}],
}


@pytest.fixture(scope="module")
def wide() -> Target:
    """A target whose layers are one call each."""
    return Target(model_of("llama"))


def logits_of(drafter: HeadDrafter, target: Target, kernels: bool) -> list[torch.Tensor]:
    """All logits that an answer is drafted by, of trees of one form."""
    found, decoder = [], decoder_for(target, drafter, 4, None if kernels else False)
    inner = drafter.operations.largest

    def watched(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        """Note what is asked."""
        found.append(logits.float())
        return inner(logits, count)

    drafter.operations = replace(drafter.operations, largest=watched)
    decoder.generate(random_prompts(1)[0], max_new_tokens=3)
    return found


@pytest.mark.parametrize("in_int8", [False, True])
def test_kernels_guess_what_torch_guesses(family, in_int8, wide, make_head, monkeypatch) -> None:
    """Heads of all families and forms that read packed weights, bfloat16 or whole numbers."""
    monkeypatch.setattr(packed_target, "packed_head", lambda head: packed_head(head, in_int8))
    for form in [{}, *OTHER_FORMS.get(family, [])]:
        head = make_head(family, wide, **form).to(torch.bfloat16)
        both = []
        for kernels in (False, True):
            drafter = drafter_for(head, wide)
            both.append(logits_of(drafter, wide, kernels))
            packs = any(isinstance(part, PackedLinear) for part in drafter.head.modules())
            assert packs == (kernels and family != "mtp"), form
        depths = min(logits[0].shape[1] for logits in both)  # Medusa may ask all heads
        expected, found = (logits[0][:, :depths] for logits in both)
        share = float((found - expected).norm() / expected.norm())
        assert share < (IN_INT8 if in_int8 else ROUNDING), (form, share)


def test_layers_are_one_call(wide, make_head) -> None:
    """A pass of an EAGLE-3 head, and each layer of other heads."""
    head = make_head("eagle3", wide, num_layers=2).to(torch.bfloat16)
    assert packed_head(head).in_one_call is not None and head.in_one_call is None
    for name in ("eagle", "hydra", "parallel"):
        packed = packed_head(make_head(name, wide).to(torch.bfloat16))
        layers = [part for part in packed.modules() if hasattr(part, "added")]
        assert layers and all(isinstance(layer.added, PackedAdding) for layer in layers)


def test_weights_of_a_head_that_change_are_packed_again(wide, make_head) -> None:
    head = make_head("eagle3", wide).to(torch.bfloat16)
    drafter = drafter_for(head, wide)
    before = logits_of(drafter, wide, True)
    with torch.no_grad():
        head.lm_head.weight.mul_(-1)
    after = logits_of(drafter, wide, True)
    assert torch.allclose(before[0], -after[0], atol=0.05 * float(before[0].abs().max()))


@pytest.mark.parametrize("rows", [1, 3])
def test_trees_grow_as_torchs_operations_grow_them(rows) -> None:
    """Equal scores, paths of no chance, and damaged drafts, whose probabilities are NaN."""
    torch.manual_seed(rows)
    ours = [replacement_of(f) for f in (dynamic.open_level, dynamic.with_children)]
    theirs = [dynamic.open_level, dynamic.with_children]
    growth, width = dynamic.Growth.of(torch.arange(rows), torch.randn(rows, 1, 32).bfloat16()), 4
    first = -torch.rand(rows, 1, width), torch.randint(50, (rows, 1, width))
    growth = dynamic.with_children(growth, growth.opened, *first)
    for count in (3, 5, 2):
        given = growth, torch.arange(count), width
        found, expected = ours[0](*given), theirs[0](*given)
        assert all(map(torch.equal, found, expected))
        log_probs = -torch.randint(3, (rows, count, width)) / 2
        log_probs[0, 0, :3] = torch.tensor([torch.nan, -torch.inf, 0.5])
        given = growth, found.numbers, log_probs, torch.randint(50, (rows, count, width))
        growth, expected = ours[1](*given), theirs[1](*given)
        assert all(map(torch.equal, growth[:5], expected[:5]))
        states = torch.randn(rows, count, 32).bfloat16()
        growth = growth._replace(states=states, visible=found.visible)
    choose = replacement_of(dynamic.best_tree)
    for size in (2, 9, growth.scores.shape[1]):
        given = growth, torch.arange(size), 4
        assert all(map(torch.equal, choose(*given), dynamic.best_tree(*given)))


def test_masks_are_those_of_torchs_operations() -> None:
    kernel = replacement_of(visible_columns)
    for rows, shared in ((1, True), (3, True), (3, False)):
        visible = torch.rand(1 if shared else rows, 4, 6) > 0.5
        lengths, seen = torch.tensor([5, 0, 3])[:rows], torch.arange(12)
        for first in (7, 10):  # the last node's columns may be after those in use
            columns = torch.arange(first, first + 4)
            expected = visible_columns(visible, lengths, seen, columns)
            assert torch.equal(kernel(visible, lengths, seen, columns), expected)


@pytest.mark.parametrize(
    "form", [{}, {"num_layers": 2, "norm_before_residual": True, "norm_feedback": False}]
)
def test_a_pass_of_an_eagle3_head_computes_what_its_definition_says(form, wide, make_head) -> None:
    """After true tokens and drafted ones; at all positions, and at the last of each row."""
    torch.manual_seed(0)
    head = packed_head(make_head("eagle3", wide, **form).to(torch.bfloat16), in_int8=False)
    rows, tokens, size = 2, 4, head.config.hidden_size
    heads, width, _ = head.layers[0].self_attn.cache_sizes
    shape = len(head.layers), rows, heads, 20, width
    keys, values = (torch.randn(shape).bfloat16() for _ in range(2))
    mask = torch.rand(rows, 1, tokens, 12) < 0.8
    mask[..., -1] = True
    table, states = torch.randn(50, size).bfloat16(), torch.randn(rows, tokens, size).bfloat16()
    read = torch.randint(50, (rows, tokens)), states
    for is_drafted, ends in ((False, torch.tensor([4, 2])), (True, None)):
        results = []
        for run in (head.in_one_call, partial(operations.eagle3_pass, *head.in_one_call.args)):
            cache = list(keys.clone()), list(values.clone()), torch.arange(8, 12)
            seen = is_drafted, torch.arange(8).view(rows, tokens), mask, *cache
            results.append((*run(table, *read, *seen, ends), *cache[0], *cache[1]))
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=2**-5, atol=0.05)
