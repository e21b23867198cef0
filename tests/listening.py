"""A streamer for tests."""

import torch
from transformers.generation.streamers import BaseStreamer


class Listener(BaseStreamer):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def put(self, value: torch.Tensor) -> None:
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")
