#!/usr/bin/env bash
# Prefill of a Qwen3-30B-A3B-shaped model (random weights) on one and two GPUs, experts in host RAM and resident.
#
#     benchmarks/gpu_prefill.sh OUT_DIR        needs two GPUs and 40 GB of free host RAM; about five minutes
#
# Writes one JSON file per setup (the format of `overspill bench -o json`) and prints a line for each test.
set -uo pipefail
out=$1
mkdir -p "$out"
model=(--shape qwen3-30b-a3b --quant Q8_0)
two=(-dev cuda:0,cuda:1 -c 53248 -b 53248)
one=(-dev cuda:0 -c 53248 -b 53248)
long=(-p 8192,53248 -n 0 -r 3 -ub 4096)

run() {
    local name=$1
    shift
    if timeout 170 python3 -m overspill.cli bench "$@" -o json >"$out/$name.json" 2>"$out/$name.log"; then
        python3 - "$out/$name.json" "$name" <<'PY'
import json, sys
for r in json.load(open(sys.argv[1])):
    print(f"{sys.argv[2]:28} {r['schedule']:13} g{r['grain']:<2} pp{r['n_prompt']:<6} {r['avg_ts']:9.0f} +- {r['stddev_ts']:<7.0f}"
          f" predicted {r['predicted_ts']:9.0f}  up {r['uploaded_bytes'] / 1e9:6.1f} GB  busy "
          + " ".join(f"{b:.0%}" for b in r["busy"].values())
          + f"  allocs {r['device_allocations']} syncs {r['device_syncs']}")
PY
    else
        echo "$name failed: $(tail -n 1 "$out/$name.log")"
    fi
}

run two-host-breadth "${model[@]}" "${two[@]}" "${long[@]}" -cmoe --schedule breadth-first --grain 1
run two-host-depth "${model[@]}" "${two[@]}" "${long[@]}" -cmoe --schedule depth-first --grain 24
run two-host-short "${model[@]}" -dev cuda:0,cuda:1 -c 4096 -p 128,512,2048 -n 0 -r 3 -cmoe
run one-host-breadth "${model[@]}" "${one[@]}" "${long[@]}" -cmoe --schedule breadth-first
run one-resident "${model[@]}" "${one[@]}" "${long[@]}"
run two-resident-depth "${model[@]}" "${two[@]}" "${long[@]}" --schedule depth-first --grain 24
