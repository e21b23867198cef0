#!/bin/sh
# Everything that only a GPU can tell, in one run of at most 25 minutes: see gpu.py beside this file.
# Needs the project installed, and no network. Options are those of gpu.py; try `--large 91M` first.
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" benchmarks/gpu.py "$@"
