#!/bin/bash
# The differential test (tests/integration/torch_oracle) against the allocators of several PyTorch releases.
# usage: releases.sh [--publish] PROGRAMS [VERSION...]   all releases if none is named
# PROGRAMS is the number for each release. --publish writes results/releases/README.md. Oracles are built and kept in
# target/torch-oracles; a release that cannot be built is skipped with the reason. PROFILE=fast takes that profile of Cargo.
# Exit code 1 if a release differs, 77 if none could be built.
set -u
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
command="tools/torch-oracle/releases.sh $*"
publish=
if [ "${1:-}" = --publish ]; then publish=1; shift; fi
programs=${1:?usage: releases.sh [--publish] PROGRAMS [VERSION...]}
shift
versions=${*:-2.0.1 2.1.2 2.2.2 2.3.1 2.4.1 2.5.1 2.6.0 2.7.1 2.8.0 2.9.1 2.10.0 2.11.0 2.12.0 2.13.0 2.14.0 2.15.0}
profile=${PROFILE:-release}
test="cargo test --profile $profile --locked --test integration torch_oracle"
# The test runs ten seeds.
export OOMPH_TORCH_PROGRAMS=$(((programs + 9) / 10))
logs=target/torch-oracles
mkdir -p "$logs"
table="pytorch,programs,calls,differences,ended_early,commit,date"
origin="$(git rev-parse --short=12 HEAD)$(git diff --quiet HEAD || echo '-changed'),$(date -u +%Y-%m-%d)"
# Most of the time of a build is spent waiting for the package index.
printf '%s\n' $versions | xargs -P 4 -I VERSION sh -c "'$here/build.sh' $logs/VERSION VERSION > $logs/VERSION.build.log 2>&1"
differs=0
built=0
for version in $versions; do
  reason=$(tail -n 1 "$logs/$version.build.log")
  if [ "${reason#built }" = "$reason" ]; then
    echo "$version: skipped, the oracle cannot be built here: $reason"
    continue
  fi
  built=$((built + 1))
  if OOMPH_TORCH_ORACLE=$PWD/$logs/$version/oracle $test -- --nocapture > "$logs/$version.test.log" 2>&1; then
    # "N equal programs, N calls; N end early ..."
    counts=$(grep -o '[0-9]* equal programs, [0-9]* calls; [0-9]* end early' "$logs/$version.test.log" | head -n 1)
    read -r equal calls early <<< "$(echo "$counts" | tr -dc '0-9 \n' | tr -s ' ')"
    echo "$version: $counts"
    table="$table
$version,${equal:-0},${calls:-0},0,${early:-0},$origin"
  else
    differs=1
    echo "$version: DIFFERS; see $logs/$version.test.log"
    grep -m 1 -A 6 'panicked at' "$logs/$version.test.log"
    table="$table
$version,0,0,1,0,$origin"
  fi
done
if [ -n "$publish" ]; then
  mkdir -p results/releases
  # tools/publish.py --write puts the table into results/releases/README.md.
  printf '%s\n' "$table" > results/releases/releases.csv
  echo "written: results/releases/releases.csv, by $command; next: tools/publish.py --write"
fi
[ "$built" -gt 0 ] || exit 77
exit "$differs"
