"""What a check of a model leaves of it, while other threads use it."""

import torch
from torch import nn

from drafthead.core.target.hooks import evaluating, leaving_nothing


def small() -> nn.Module:
    part = nn.Linear(2, 2)
    part.register_buffer("scale", torch.ones(1))
    return nn.Sequential(part)


def test_what_passes_leave_is_taken_away_and_what_they_change_comes_back() -> None:
    model = small()
    part = model[0]
    part.kept = "before"
    scale = part.scale
    with leaving_nothing(model):
        part.kept, part.left = "after", 1
        part.scale = torch.zeros(1)
        part.register_buffer("original", torch.zeros(1))
        del part.in_features
    assert part.kept == "before" and not hasattr(part, "left") and part.in_features == 2
    assert part.scale is scale and [*part._buffers] == ["scale"]


def test_other_threads_find_all_of_a_module_while_what_was_left_is_taken_away() -> None:
    """Seen from within, as an object goes: what another thread could see at that time."""
    model = small()
    part = model[0]
    seen = []

    class Left:
        def __del__(self) -> None:
            seen.append([hasattr(part, name) for name in ("weight", "scale", "training")])

    with leaving_nothing(model):
        part.left = Left()
        part._buffers["left"] = Left()  # type: ignore[assignment]
    assert seen == [[True] * 3] * 2


def test_what_comes_and_goes_with_passes_of_other_threads_is_left_to_them() -> None:
    model = small().train()
    part = model[0]
    mode = evaluating(model)
    mode.__enter__()
    part.forward = part.forward
    with leaving_nothing(model):  # while a pass ends
        mode.__exit__(None, None, None)
        del part.forward
    assert part.training and "forward" not in vars(part)
    with leaving_nothing(model):  # while one begins
        own = part.forward = part.forward
        mode = evaluating(model)
        mode.__enter__()
    assert not part.training and part.forward is own
