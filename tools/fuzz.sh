#!/usr/bin/env bash
# Coverage-guided fuzzing of every reader with libFuzzer, on stable Rust: fuzz.sh [SECONDS per target, 60] [TARGET...]
#
# Inputs begin with fuzz/corpus/TARGET. New inputs that reach new code are kept in fuzz/found/TARGET, crashes in
# fuzz/crashes; git ignores both. Exit code 1: a target crashed, took more than 20 s or more than 1 GiB. Exit code 77: there is
# no C++ compiler.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
shift || true

if ! command -v c++ > /dev/null && ! command -v "${CXX:-none}" > /dev/null; then
    echo "libFuzzer needs a C++ compiler, and there is none; nothing was fuzzed"
    exit 77
fi
host=$(rustc -vV | sed -n 's/^host: //p')
coverage="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares"
# With --target the flags do not apply to build scripts.
RUSTFLAGS="$coverage" cargo build --manifest-path fuzz/Cargo.toml --release --target "$host" --target-dir target/fuzz
binary=$PWD/target/fuzz/$host/release/oomph-fuzz

# Readers that take a path read files in memory, if the machine has such a folder.
FUZZ_FOLDER=$(mktemp -d -p "$([ -d /dev/shm ] && echo /dev/shm || echo "${TMPDIR:-/tmp}")" oomph-fuzz-XXXXXX)
export FUZZ_FOLDER
trap 'rm -rf "$FUZZ_FOLDER"' EXIT

all=$(sed -n 's/^    ("\([a-z_]*\)", [a-z_]*),$/\1/p' fuzz/src/main.rs)
failed=()
for target in "${@:-$all}"; do
    for name in $target; do
        if [ ! -d "fuzz/corpus/$name" ]; then
            echo "fuzz/corpus/$name does not exist; targets: $(echo $all)" >&2
            exit 2
        fi
        mkdir -p "fuzz/found/$name" fuzz/crashes
        log=fuzz/crashes/$name.log
        printf '== %-12s' "$name"
        if FUZZ_TARGET=$name "$binary" -max_total_time="$seconds" -rss_limit_mb=1024 -timeout=20 -max_len=262144 \
            -artifact_prefix="fuzz/crashes/$name-" -print_final_stats=1 -verbosity=1 \
            "fuzz/found/$name" "fuzz/corpus/$name" > "$log" 2>&1; then
            runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
            peak=$(sed -n 's/^stat::peak_rss_mb: *//p' "$log")
            covered=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -1)
            echo "$runs inputs, $covered edges, at most $peak MiB"
            rm -f "$log"
        else
            echo "FAILED"
            tail -25 "$log"
            failed+=("$name")
        fi
    done
done
if [ ${#failed[@]} -gt 0 ]; then
    echo
    echo "failed: ${failed[*]}; repeat one with: FUZZ_TARGET=TARGET $binary fuzz/crashes/FILE"
    exit 1
fi
