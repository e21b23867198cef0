"""Features of packed rows for targets that carry a running state."""

import pytest
import torch
from architectures import STATEFUL, tiny_model
from tiny import VOCAB

from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.target import Target
from drafthead.heads.objectives.batch import HeadBatch
from drafthead.train.features.reading import read_features


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "mamba2"])
@pytest.mark.parametrize("last", [True, False])
def test_packed_rows_have_the_features_of_each_text_alone(name: str, last: bool) -> None:
    target = Target(tiny_model(name, STATEFUL[name]))
    segments = torch.tensor([[1, 1, 1, 2, 2, 0], [1] * 5 + [2], [1, 2, 3, 3, 3, 3]])
    ids = torch.randint(1, VOCAB, segments.shape)
    spec = FeatureSpec(layers=(0, 1), last=last)
    tokens = HeadBatch(ids, segments, segments > 0)
    found = read_features(target, tokens, spec, "no").features
    assert (found.last is not None) == last
    for row, numbers in enumerate(segments.tolist()):
        for number in {*numbers} - {0}:
            here = torch.tensor(numbers) == number
            text = ids[row, here][None]
            positions = torch.arange(text.shape[1])[None]
            alone = target.read(text, positions, None, spec)
            both = [(found.taps[1], alone.taps[1]), *([(found.last, alone.last)] if last else [])]
            for packed, apart in both:
                torch.testing.assert_close(packed[row, here], apart[0], atol=1e-3, rtol=1e-3)
