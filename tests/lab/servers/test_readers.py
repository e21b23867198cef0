"""Heads in the servers themselves: the target's text, and as many accepted drafts as here.

They run where the servers are: `benchmarks/readers.py` says how they are installed.
"""

import os
from pathlib import Path

import pytest
from readers import DRAFTS, TEXT, audited

from drafthead.core.storage.disk_cache import cache_folder
from drafthead.core.target.any_target import load_decoder_only

SHIPPED = Path(__file__).parents[3] / "assets" / "smollm2_eagle3"
# What the environment must name.
NEEDED = {"vllm": ["VLLM"], "llamacpp": ["LLAMA_CPP", "LLAMA_SERVER", "PORTABLE_HEAD"]}


@pytest.mark.slow
@pytest.mark.parametrize("server", NEEDED)
def test_a_server_reads_the_head_as_we_do(server: str) -> None:
    missing = [name for name in NEEDED[server] if name not in os.environ]
    if missing or not (cache_folder("models") / "smollm2").exists():
        pytest.skip(f"{server} needs {', '.join(missing) or 'drafthead fetch smollm2'}")
    head = os.environ["PORTABLE_HEAD"] if server == "llamacpp" else str(SHIPPED)
    target = load_decoder_only("smollm2", "bfloat16", "cpu")
    row = audited(server, head, "smollm2", target, 48)
    assert row["findings"][TEXT]["remedy"] is None, row
    assert row["findings"][DRAFTS]["remedy"] is None, row
