"""The terminal's side of a run: the progress bar, and stopping by Ctrl-C."""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

import typer
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from drafthead.core.errors import UserError

SECONDS_FOR_MAIN = 15


class StopRequest:
    """Turns Ctrl-C and SIGTERM into a request that the loop answers between two steps."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, signal.Handlers] = {}

    def __enter__(self) -> "StopRequest":
        """Catch the signals."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the signal handlers from before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        # Launchers pass on a signal that the terminal has sent already, so repeats are ignored.
        if not self.requested:
            print("\nstopping after this step and saving...", file=sys.stderr)
        self.requested = True


def seconds_between_lines() -> int:
    """Return how long a progress bar stays as it is: few lines in a log file."""
    return 1 if sys.stderr.isatty() else 30


class StepBar(tqdm):
    """A progress bar over steps, or over seconds when the duration is a time."""

    def __init__(self, total: float, unit: str, done: float, shown: bool):
        super().__init__(
            total=round(total),
            initial=min(round(done), round(total)),
            unit=unit,
            disable=not shown,
            mininterval=seconds_between_lines(),
            dynamic_ncols=True,
            # Without tqdm's rate: of seconds it is 1 a second.
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} {unit} [{elapsed}<{remaining}{postfix}]",
        )

    def show(self, done: float, loss: float, right: float, tokens_per_second: float) -> None:
        """Move the bar to `done` and show the numbers of the last step.

        `right` first guesses in a row, over all positions: more than decoding accepts.
        """
        self.set_postfix_str(
            f"loss {loss:.3f}, {right:.2f} guesses right, {tokens_per_second:.0f} tok/s",
            refresh=False,
        )
        self.update(min(round(done), self.total) - self.n)


class AnswerBar(tqdm):
    """A progress bar over answers or prompts that shows the speed of decoding."""

    def __init__(
        self,
        total: int,
        done: int = 0,
        verb: str = "distill",
        unit: str = "answer",
        counted: str = "tokens in answers that ended",
    ):
        """`done` of `total` were there before; `counted`: what the tokens of `count` are."""
        super().__init__(
            total=total, initial=done, desc=verb, unit=unit, mininterval=seconds_between_lines()
        )
        self.tokens, self.counted = 0, counted
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the bar was made."""
        return time.perf_counter() - self._started

    def count(self, tokens: int, ended: int) -> None:
        """Count new tokens, of a pass or of answers that ended, and how many units are complete."""
        self.tokens += tokens
        speed = self.tokens / self.seconds
        self.set_postfix_str(
            f"{self.tokens:,} {self.counted}, {speed:,.0f} a second", refresh=False
        )
        self.update(ended)


def is_main() -> bool:
    """Tell whether this is the first of the processes that a launcher has started."""
    return int(os.environ.get("RANK", "0")) == 0


def run_launched(main: Callable[..., None]) -> None:
    """Run a command in a process that accelerate has launched; print errors as one sentence."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    try:
        typer.run(main)
    except UserError as error:
        # The launcher kills all processes once one has ended. The others wait, so that the main
        # process can print its error first, which mostly is the same.
        if not is_main():
            time.sleep(SECONDS_FOR_MAIN)
        print(f"drafthead: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def quiet_libraries() -> None:
    """Log what this project says, in the main process alone, and of the libraries only warnings."""
    logging.getLogger("drafthead").setLevel(logging.INFO if is_main() else logging.ERROR)
    # It would warn of the two names of tied weights at every save.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)  # of layers on disk
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # else one line per retry
    disable_progress_bar()
