"""A target whose matrices are parted between two processes."""

import subprocess
import sys
from pathlib import Path

import pytest
from tiny import write_target

from drafthead.core.errors import UserError
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.placement import Placement

WORKER = Path(__file__).parent / "shared_target.py"


@pytest.mark.slow
def test_two_processes_decode_the_text_of_one_whatever_their_planners_think(tmp_path: Path) -> None:
    write_target(tmp_path / "model")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, str(WORKER), str(tmp_path / "model")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("the same text") == 2


def test_one_process_cannot_share_a_target(tmp_path: Path) -> None:
    write_target(tmp_path / "model")
    with pytest.raises(UserError, match="torchrun --nproc-per-node 2"):
        load_decoder_only(str(tmp_path / "model"), placement=Placement("tensor"))
