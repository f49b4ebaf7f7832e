#!/usr/bin/env bash
# Trains with torchtitan's own trainer and ends with the first and the last loss:
#     bash scripts/train.sh [FILE.toml] [torchtitan flags…]
#
# NGPU         processes, one a GPU (default 1; on a machine without a GPU they share the CPU)
# CONFIG_FILE  the TOML, where none is the first argument (default: the FP8 debug model)
# LOG_RANK     ranks whose output is shown (default 0)
# PYTHON       an environment to use as it is; see setup.sh
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
say() { printf 'train: %s\n' "$*" >&2; }
fail() {
    say "error: $*"
    exit 1
}

config=${CONFIG_FILE:-$root/train_configs/llama4_debug_fp8moe.toml}
if [[ ${1:-} == *.toml && $1 != -* ]]; then
    config=$1
    shift
fi
for arg in "$@"; do
    # torchtitan would read the first --job.config_file it sees, ours, and only report the second.
    [[ $arg != --job.config[_-]file* ]] ||
        fail "$arg came among the flags; give the TOML as the first argument or as CONFIG_FILE=…"
done
if [ -e "$config" ]; then # seen from where the caller is
    config=$(cd "$(dirname "$config")" && pwd -P)/$(basename "$config")
elif [ -e "$root/$config" ]; then
    config=$root/$config
else
    fail "no TOML at $config, seen from $PWD or from $root"
fi

nproc_per_node=${NGPU:-1}
[[ $nproc_per_node =~ ^[1-9][0-9]*$ ]] || fail "NGPU must be a whole number from 1; it is '$nproc_per_node'"

python=$(bash "$root/scripts/setup.sh")

# The TOMLs name tokenizer and corpus from the repository root. PYTHONPATH: in an environment of the
# user's own the package need not be installed.
cd "$root"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
export LOG_RANK=${LOG_RANK:-0} # torchtitan reads it too, to warn where pipeline stages hide the loss
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
if [ "$nproc_per_node" -gt 1 ] && [ -z "${OMP_NUM_THREADS:-}" ]; then
    # torchrun would give each process one thread, and without it each would take every core.
    threads=$(($(nproc) / nproc_per_node))
    export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
fi

mkdir -p outputs
log=outputs/train-$(date +%Y%m%d-%H%M%S)-$$.log
say "$nproc_per_node process(es), $config${*:+, flags: $*}; log: $log"

status=0
"$python" -m torch.distributed.run --nproc_per_node="$nproc_per_node" \
    --rdzv_backend c10d --rdzv_endpoint=localhost:0 \
    --local-ranks-filter "$LOG_RANK" --role rank --tee 3 \
    -m torchtitan.train --job.config_file "$config" "$@" 2>&1 | tee "$log" || status=$?

losses=$(
    sed $'s/\x1b\\[[0-9;]*m//g' "$log" | awk '
        / step: +[0-9]+ +loss: / && !/validate step:/ {
            for (i = 1; i < NF; i++) {
                if ($i == "step:") step = $(i + 1)
                if ($i == "loss:") loss = $(i + 1)
            }
            if (!first) first = "loss " loss " at step " step
            last = "loss " loss " at step " step
        }
        END { if (first) print "first " first ", last " last }'
)
say "${losses:-no loss was logged}"
[ "$status" -eq 0 ] || say "error: torchrun ended with status $status; the reason is above and in $log"
exit "$status"
