"""Trains every family that can be trained, one after the other in the same processes, for tests.

Launched, not imported: `accelerate launch all_families.py CONFIG FOLDER [SECTION.KEY=VALUE]...`.
"""

import sys
from pathlib import Path

from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from fsdp_on_cpus import call_processes_gpus

from drafthead.heads.base import HEADS
from drafthead.train.draft_models.student import FAMILY
from drafthead.train.run.config import load_run_config
from drafthead.train.train_heads import train

if __name__ == "__main__":
    config, folder, *settings = sys.argv[1:]
    under_fsdp = "--fsdp" in settings
    settings = [setting for setting in settings if setting != "--fsdp"]
    # A run ends its process group, and processes cannot meet again where they have met before.
    PartialState.destroy_process_group = lambda *_: None
    for family in (*sorted(HEADS), FAMILY):
        if under_fsdp:
            call_processes_gpus()
        run = [f"head.family={family}", f"train.output={Path(folder, family)}", *settings]
        assert train(load_run_config(Path(config), run))
        AcceleratorState._reset_state()
        GradientState._reset_state()
