#!/usr/bin/env bash
# Tests tools/slurm/oomph.sbatch on a real Slurm: starts munged, slurmctld and slurmd on this
# machine with their own configuration, in a temporary folder. A Slurm that already runs is not
# touched.
#
#     tools/slurm/loopback.sh [OOMPH [ARGUMENTS OF `oomph run`..]]
#
# An array of four tasks shares a suite. One task is requeued by hand, one gets the signal that its
# time is up, and both resume. The merged results must equal those of a single process, byte for
# byte. Exit code 77: Slurm is not available; the reason is printed.
set -euo pipefail
cd "$(dirname "$0")/../.."
oomph=$(realpath "${1:-target/release/oomph}")
shift || true
[ "$#" -gt 0 ] || set -- strategies

without() { echo "Slurm is not available: $*"; exit 77; }
fail() {
    echo "slurm: $*" >&2
    tail -n 20 "${place:-.}"/slurmctld.log "${place:-.}"/task-*.log >&2 2>/dev/null || true
    exit 1
}

if ! command -v slurmctld slurmd munged mungekey sbatch >/dev/null; then
    command -v apt-get >/dev/null || without "slurmctld, slurmd or munged is missing, and there is no apt-get"
    [ "$(id -u)" -eq 0 ] || without "slurmctld, slurmd or munged is missing, and only root can install it"
    apt-get install --yes --no-install-recommends slurm-wlm munge >/dev/null 2>&1 ||
        { apt-get update >/dev/null 2>&1 && apt-get install --yes --no-install-recommends slurm-wlm munge >/dev/null 2>&1; } ||
        without "apt-get install slurm-wlm munge fails"
fi
[ -x "$oomph" ] || fail "$oomph is not there; build it first, or name another"

place=$(mktemp -d)
chmod 755 "$place" # munged wants its socket to be reachable
stop() {
    for name in slurmd slurmctld munged; do
        if [ -f "$place/$name.pid" ]; then
            pid=$(cat "$place/$name.pid")
            kill "$pid" 2>/dev/null || true
            for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
        fi
    done
    rm -rf "$place"
}
trap stop EXIT

host=$(hostname -s)
port=$((20000 + $$ % 10000 * 2))
export SLURM_CONF=$place/slurm.conf
cat >"$SLURM_CONF" <<CONF
ClusterName=loopback
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$((port + 1))
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
CryptoType=crypto/munge
# A requeued task waits until its old credential has expired.
AuthInfo=socket=$place/munge.socket,cred_expire=10
StateSaveLocation=$place/state
SlurmdSpoolDir=$place/spool
SlurmctldPidFile=$place/slurmctld.pid
SlurmdPidFile=$place/slurmd.pid
SlurmctldLogFile=$place/slurmctld.log
SlurmdLogFile=$place/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=5
ReturnToService=2
# Declare eight processors regardless of the machine, so that four tasks run at once.
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
mkdir "$place/state" "$place/spool"

mungekey --create --keyfile="$place/munge.key"
munged --force --key-file="$place/munge.key" --socket="$place/munge.socket" --pid-file="$place/munged.pid" \
    --seed-file="$place/munge.seed" --log-file="$place/munged.log" 2>/dev/null || without "munged does not start"
slurmctld -f "$SLURM_CONF" || without "slurmctld does not start"
slurmd -f "$SLURM_CONF" || without "slurmd does not start: $(tail -1 "$place/slurmd.log")"

# Waits until a command succeeds, at most for this many seconds.
within() {
    local seconds=$1 what=$2
    shift 2
    for _ in $(seq $((seconds * 5))); do
        "$@" && return
        sleep 0.2
    done
    sinfo --long || true
    squeue || true
    fail "$what: not after $seconds seconds"
}
is_idle() { [ "$(sinfo --noheader --format=%T)" = idle ]; }
(within 60 "the node is idle" is_idle) || without "the node does not come up"
echo "slurm $(sinfo --version | cut -d' ' -f2) runs on $host"

echo "one process: oomph run $*"
"$oomph" run "$@" --output "$place/alone" --format csv >/dev/null 2>&1 || fail "the single process failed"

job=$(OOMPH=$oomph OOMPH_RESULTS=$place/shards sbatch --parsable --cpus-per-task=1 --output="$place/task-%a.log" \
    tools/slurm/oomph.sbatch "$@" --jobs 1)
echo "an array of four: job $job"

rows() { cat "$place/shards/shard-$1/runs.csv" 2>/dev/null | tail -n +2 | wc -l; }
has_rows() { [ "$(rows "$1")" -gt 1 ]; }
field() { scontrol show job "${job}_$1" | grep -o "$2=[^ ]*" | head -1 | cut -d= -f2; }
state_is() { [ "$(field "$1" JobState)" = "$2" ]; }

within 120 "task 2 has rows" has_rows 2
scontrol requeue "${job}_2"
echo "task 2 was requeued by hand after $(rows 2) cases"
within 120 "task 3 has rows" has_rows 3
scancel --batch --signal=USR1 "${job}_3"
echo "task 3 got the time-limit signal after $(rows 3) cases"

for task in 1 2 3 4; do
    within 600 "task $task is done" state_is "$task" COMPLETED
done
for task in 2 3; do
    [ "$(field "$task" Restarts)" = 1 ] || fail "task $task was started $(field "$task" Restarts) times again, not once"
    grep -q "interrupted after .* --resume" "$place/task-$task.log" || fail "task $task did not end in an orderly way"
done

"$oomph" report "$place"/shards/shard-* --output "$place/merged"
for name in runs.csv comparison.csv; do
    cmp "$place/alone/$name" "$place/merged/$name" || fail "$name is not that of a single process"
done
echo "runs.csv and comparison.csv of the merged shards equal those of one process, byte for byte" \
    "($(($(wc -l <"$place/merged/runs.csv") - 1)) cases)"
