#!/usr/bin/env bash
# Makes the environment in which TRL is measured: .venv-trl beside .venv, never mixed with it.
#
#   bench/setup_trl.sh                  PYTHON=… chooses the interpreter; default: that of .venv, else python3
#
# torch goes in first and alone: a package that asks for "torch" before it is there pulls several GB of CUDA packages.
# transformers is the one that tutelage itself is measured with, so that both sides run the same model code.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
env_dir="$root/.venv-trl"
python="${PYTHON:-python3}"
[[ -n "${PYTHON:-}" || ! -x "$root/.venv/bin/python" ]] || python="$root/.venv/bin/python"
stamp="$env_dir/.complete"
same="from importlib.metadata import version; print('transformers==' + version('transformers'))"
transformers="$("$python" -c "$same" 2>/dev/null || echo 'transformers>=5.16.1,<5.20')"
wanted="torch==2.13.0 trl==1.16.0 $transformers"

if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
    echo "$env_dir is ready"
    exit 0
fi

[[ -x "$env_dir/bin/python" ]] || "$python" -m venv "$env_dir"
pip=("$env_dir/bin/python" -m pip --disable-pip-version-check install --quiet)

"${pip[@]}" torch==2.13.0
"${pip[@]}" torch==2.13.0 trl==1.16.0 "$transformers"
TRL_EXPERIMENTAL_SILENCE=1 "$env_dir/bin/python" - <<'PY'
import torch, transformers, trl
from trl import DistillationTrainer
from trl.experimental.gkd import GKDTrainer

print(f"torch {torch.__version__}, trl {trl.__version__}, transformers {transformers.__version__}")
PY
echo "$wanted" > "$stamp"
