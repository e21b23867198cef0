"""Copies of a target on the GPUs or cores of a Ray cluster, each with whole windows to answer.

A window is answered as in one process, so its rows are the same, also where they round by batch.
Ray starts an actor that has died again, and gives its windows to others.
"""

import logging
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray
import ray.data
from ray.exceptions import RayError
from transformers import PreTrainedTokenizerBase

from drafthead.core.errors import UserError, first_line
from drafthead.core.target.any_target import load_decoder_only, tokenizer_named
from drafthead.infer.decoder import Decoder
from drafthead.train.distillation.answer_source import DecoderSource
from drafthead.train.distillation.dialogue import Dialogue, DialogueJob
from drafthead.train.distillation.windows import Count, answered
from drafthead.train.settings import DistillSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loading:
    """The options with which every copy of a target is loaded."""

    target: str
    dtype: str
    device: str
    compile: bool | None

    def load(self) -> DecoderSource:
        """A copy; raises UserError as loading does."""
        target = load_decoder_only(self.target, self.dtype, self.device)
        return DecoderSource(Decoder.from_pretrained(target, compile=self.compile))


def facts_of(loading: Loading) -> tuple[frozenset[int], int | None, int | None, str | None]:
    """The end tokens, longest text, vocabulary and weights of a copy, which is loaded for them."""
    source = loading.load()
    return source.end_ids, source.max_length, source.vocab_size, source.weights()


class Actor:
    """A copy of a target that answers windows."""

    def __init__(self, loading: Loading, fingerprint: str | None, settings: DistillSettings):
        self.loading, self.fingerprint, self.settings = loading, fingerprint, settings
        self.source: DecoderSource | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """The conversations of a window with all their answers, or a UserError, pickled.

        Raised here, the error would lose its sentence among Ray's own ones.
        """
        window: list[DialogueJob] = pickle.loads(row["window"])
        try:
            self.source = self.source or self._loaded()
            [found] = answered(self.source, [window], self.settings, lambda *_: None)
        except UserError as error:
            return {"found": pickle.dumps(UserError(str(error)))}
        return {"found": pickle.dumps(found)}

    def _loaded(self) -> DecoderSource:
        """The copy; raises UserError where the files of the target are other ones."""
        source = self.loading.load()
        if source.weights() != self.fingerprint:
            raise UserError(
                f"{self.loading.target} on {ray.util.get_node_ip_address()} has other weights than "
                "on the machine that loaded it first: copy the same files to all machines"
            )
        return source


class RayActors:
    """A target in a cluster, of which only the tokenizer is here: a `WindowSource`."""

    def __init__(self, address: str, loading: Loading, cores: int | None):
        """Raises UserError if there is no cluster, and as loading the target does."""
        connect(address)
        path = Path(loading.target).expanduser()
        self.loading = Loading(
            str(path.resolve()) if path.exists() else loading.target,
            loading.dtype, loading.device, loading.compile,
        )  # fmt: skip
        self.tokenizer: PreTrainedTokenizerBase = tokenizer_named(loading.target)
        resources = ray.cluster_resources()
        gpus = 0 if loading.device == "cpu" else int(resources.get("GPU", 0))
        machines = [int(one["Resources"].get("CPU", 0)) for one in ray.nodes() if one["Alive"]]
        cores = cores or min(filter(None, machines), default=1)
        self.count = gpus or sum(each // cores for each in machines)
        self.each = {"num_gpus": 1} if gpus else {"num_cpus": cores}
        if not self.count:
            raise UserError(f"no machine of the cluster has {cores} cores: lower --ray-cores")
        with user_errors():
            facts = ray.remote(facts_of).options(**self.each).remote(self.loading)
            self.end_ids, self.max_length, self.vocab_size, self.fingerprint = ray.get(facts)
        logger.info("%d copies of %s, each on %s", self.count, loading.target, self.each)

    def weights(self) -> str | None:
        """The `weights_fingerprint` of every copy."""
        return self.fingerprint

    def answered(
        self, windows: Sequence[list[DialogueJob]], settings: DistillSettings, count: Count
    ) -> Iterator[list[Dialogue]]:
        """The conversations of each window with all their answers, in order.

        Raises UserError as an actor does.
        """
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        rows = [{"window": pickle.dumps(window)} for window in windows]
        actors = ray.data.ActorPoolStrategy(size=min(self.count, len(rows)))
        found = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
            cast(Any, Actor),  # a class, made once in each process
            fn_constructor_args=[self.loading, self.fingerprint, settings],
            compute=actors,
            num_gpus=self.each.get("num_gpus"),
            num_cpus=self.each.get("num_cpus"),
        )
        with user_errors():
            for row in found.iter_rows():
                dialogues: list[Dialogue] | UserError = pickle.loads(row["found"])
                if isinstance(dialogues, UserError):
                    raise dialogues
                answers = [answer for one in dialogues for answer in one.answers]
                count(sum(len(answer.answer) for answer in answers), len(answers))
                yield dialogues


def connect(address: str) -> None:
    """Join a cluster; with `auto` this machine's, which is begun where there is none.

    Raises UserError where there is none at the address.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray").setLevel(logging.WARNING)
    place = None if address == "auto" else address
    try:
        ray.init(place, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"no Ray cluster answers at {address} ({first_line(error)}): start it with `ray start "
            "--head`, or correct the address"
        ) from error


@contextmanager
def user_errors() -> Iterator[None]:
    """Raise what fails in the cluster as UserError: the one of a task, or what Ray says last."""
    try:
        yield
    except RayError as error:
        cause = getattr(error, "cause", None)
        last = str(error).strip().splitlines()[-1]
        own = isinstance(cause, UserError)
        raise UserError(str(cause) if own else f"the Ray cluster failed: {last}") from error
