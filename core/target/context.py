"""The number of tokens that a target's positions allow, and what differs past them."""

from dataclasses import dataclass

from transformers.configuration_utils import PretrainedConfig

from drafthead.core.errors import UserError

STRETCHED = ("linear", "yarn")  # allow `factor` times as many tokens as were trained
CHANGING = ("dynamic", "longrope")  # rotate all tokens otherwise where a text gets longer


@dataclass(frozen=True)
class Context:
    """The tokens of prompt and answer together that positions allow."""

    length: int | None  # None: no end
    # The way of scaling whose frequencies change past `length`. What the cache holds was rotated
    # with others, and the nodes of a tree would each need their own.
    changing: str | None = None

    @classmethod
    def of(cls, config: PretrainedConfig) -> "Context":
        """The context of a model's text configuration."""
        longest: int | None = getattr(config, "max_position_embeddings", None)
        rope = getattr(config, "rope_parameters", None) or {}
        if longest is None:
            return cls(None)
        # Some models have parameters for each kind of layer. Their max_position_embeddings is that
        # of the stretched layers; for one set of parameters it may be what was trained.
        parts = [rope] if "rope_type" in rope else [p for p in rope.values() if isinstance(p, dict)]
        trained = [part.get("original_max_position_embeddings", longest) for part in parts]
        for part, length in zip(parts, trained, strict=True):
            if (kind := part.get("rope_type")) in CHANGING:
                return cls(min(longest, length), kind)
        if rope.get("rope_type") in STRETCHED:
            return cls(max(longest, int(rope["factor"] * trained[0])))
        return cls(longest)

    def room(self, prompt: str, length: int, wanted: int) -> int:
        """The number of new tokens after a prompt of `length` that fit, at most those `wanted`.

        Raises UserError, beginning with the name of the `prompt`, when none fits, and when not all
        fit of a target whose next tokens would be rotated otherwise.
        """
        if self.length is None:
            return wanted
        room = self.length - length
        if room < 1:
            raise UserError(
                f"{prompt} has {length} tokens, but the target's context holds {self.length}: "
                "shorten the prompt"
            )
        if self.changing is not None and wanted > room:
            raise UserError(
                f"{prompt} has {length} tokens and may get {wanted} more, but past {self.length} "
                f"tokens this target's rotary frequencies ({self.changing}) change for all tokens, "
                f"those in its cache too: set max_new_tokens to at most {room}"
            )
        return min(wanted, room)
