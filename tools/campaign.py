#!/usr/bin/env python3
"""Measures everything that results/ publishes, on one GPU, in slices.

    tools/campaign.py FOLDER                    all steps, until all are done
    tools/campaign.py FOLDER --minutes 9        as many as fit into nine minutes; call it again to go on
    tools/campaign.py FOLDER --only strategies  some of the steps; may be repeated
    tools/campaign.py FOLDER --list             the steps, and how far each one is

FOLDER holds the results, and after every step campaign.json: what was run, when, at which commit, on which GPU and
driver. A step that is cut off keeps what it has, and the next call continues it with `--resume`, with a program of the same
commit. After every step FOLDER.tar.gz has what is published and what a later call needs: not the files of single cases,
which are a hundred times as large. Unpacked on another day, it is the folder to go on with. The program is
target/release/oomph, or the one that --oomph names. On a machine without a GPU `--device sim` tries the script.

PyTorch and RMM are compared where their programs exist: OOMPH_TORCH_BENCH (tools/torch-oracle/build_for_gpu.sh),
OOMPH_RMM_BENCH (tools/rmm-bench/build.sh) and the bench against_peers (`cargo bench --bench against_peers --no-run`),
named by OOMPH_PEERS.
"""

import argparse
import datetime
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tarfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# A step that has less time than this left is not begun.
LEAST_SECONDS = 20
MODELS = ["reference-gpt-163m", "reference-gpt-406m", "reference-gpt-1.4b", "resnet-50", "reference-gpt-13b"]


def filled(text, folder):
    return text.replace("{folder}", str(folder))


class Step:
    """One command. `resumes`: its output is a folder that `--resume` continues. `text`: what it prints is its result.
    `variables`: set in its environment. `needs`: variables of the environment without which it cannot run."""

    def __init__(self, name, *command, resumes=False, text=False, variables=None, needs=()):
        self.name, self.command, self.resumes, self.text, self.needs = name, list(command), resumes, text, needs
        self.variables = variables or {}

    def arguments(self, folder):
        arguments = [filled(part, folder) for part in self.command]
        if self.resumes:
            target = folder / self.name
            arguments += ["--resume" if (target / "plan.csv").exists() or any(target.glob("*.csv")) else "--output", str(target)]
        return arguments

    def missing(self):
        return [name for name in self.needs if not os.environ.get(name)]


def steps(oomph, device):
    """All steps, the shortest questions first."""

    def suite(name, *more):
        return Step(name, oomph, "run", name, "--device", device, "--isolate", "never", "--jobs", "1", *more, resumes=True)

    def said(name, *arguments):
        return Step(name, oomph, *arguments, text=True)

    recordings = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "workloads/recorded").glob("*.pickle.xz"))
    integrity = ["stress", "integrity", "--device", device, "--threads", "16", "--streams", "8"]
    yield Step("h200.toml", oomph, "doctor", "--calibrate", "{folder}/h200.toml", "--device", device, text=True)
    yield suite("quick")
    yield suite("strategies")
    yield suite("leaks")
    yield suite("oom-thresholds")
    yield suite("fragmentation")
    yield suite("throughput")
    for model in MODELS:
        yield Step(f"techniques-{model}", oomph, "techniques", "--device", device, "--model", model, resumes=True)
    yield Step("claims", oomph, "claims", "--device", device, resumes=True)
    yield said("agreement.csv", "verify", "--on", device, *recordings, "--format", "csv")
    yield said("agreement-async.csv", "verify", "--on", device, "--strategy", "async", *recordings, "--format", "csv")
    yield said("integrity-large.txt", *integrity, "--sizes", "large", "--stress-duration", "30s")
    yield said("integrity-small.txt", *integrity, "--sizes", "small", "--stress-duration", "24s", "--seed", "3")
    yield said("soak.txt", "stress", "soak", "--device", device, "--stress-duration", "16s")
    yield said("adversary.txt", "stress", "adversary", "--device", device)
    peers = os.environ.get("OOMPH_PEERS", "")
    for cases, turns in [("pairs", 5), ("threads", 3)]:
        variables = {
            "OOMPH_PEER_CASES": cases,
            "OOMPH_PEER_TURNS": str(turns),
            "OOMPH_PEER_CSV": f"{{folder}}/peers-{cases}.csv",
        }
        needs = ["OOMPH_PEERS", "OOMPH_TORCH_BENCH", "OOMPH_RMM_BENCH"]
        yield Step(f"peers-{cases}.txt", peers, text=True, variables=variables, needs=needs)


def pack(folder):
    """Writes FOLDER.tar.gz without the files of single cases, pages and summaries."""
    left_out = {"cases", "report.html", "summary.md"}
    target = folder.with_name(folder.name + ".tar.gz")
    unfinished = folder.with_name(folder.name + ".tar.gz.new")
    with tarfile.open(unfinished, "w:gz") as archive:
        archive.add(folder, folder.name, filter=lambda entry: None if pathlib.Path(entry.name).name in left_out else entry)
    unfinished.replace(target)


def gpu():
    """Name and driver of the GPU, or nothing."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return None, None
    return name, driver


class Record:
    """campaign.json: one entry for every call of every step."""

    def __init__(self, folder):
        self.path = folder / "campaign.json"
        self.runs = json.loads(self.path.read_text())["runs"] if self.path.exists() else []

    def is_done(self, step):
        return any(run["step"] == step.name and run["done"] for run in self.runs)

    def add(self, **run):
        self.runs.append(run)
        unfinished = self.path.with_suffix(".new")
        unfinished.write_text(json.dumps({"runs": self.runs}, indent=1) + "\n")
        unfinished.replace(self.path)


def run(step, folder, seconds, facts, record):
    """Runs a step for at most that long. True if it came to its end."""
    arguments = step.arguments(folder)
    log = folder / "logs" / f"{step.name}.log"
    log.parent.mkdir(exist_ok=True)
    begun = time.monotonic()
    started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    output = folder / step.name if step.text and not step.command[1:2] == ["doctor"] else log
    environment = os.environ | {name: filled(value, folder.resolve()) for name, value in step.variables.items()}
    with open(output, "wb") as out, open(log, "ab") as errors:
        program = subprocess.Popen(arguments, stdout=out, stderr=errors, cwd=ROOT, env=environment)
        try:
            code = program.wait(seconds)
        except subprocess.TimeoutExpired:
            # One Ctrl-C: a run ends after its current case and keeps all finished ones.
            program.send_signal(signal.SIGINT)
            try:
                code = program.wait(60)
            except subprocess.TimeoutExpired:
                program.kill()
                code = program.wait()
    took = time.monotonic() - begun
    # 100: the GPU disagrees with a threshold or with the simulated device; 106: a strategy failed in `stress`. Both are results.
    # Other codes say that nothing was measured, or not all of it.
    done = code in (0, 100, 106)
    shown = [f"{name}={value.replace('{folder}/', '')}" for name, value in step.variables.items()]
    shown += [pathlib.Path(arguments[0]).name.split("-")[0]] + [part.replace(f"{folder}/", "") for part in arguments[1:]]
    record.add(step=step.name, command=shown, started=started, seconds=round(took, 1), code=code, done=done, **facts)
    print(f"{step.name:32} {'done' if done else 'not done':9} {took:7.1f} s, exit code {code}", flush=True)
    return done


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--minutes", type=float, default=24 * 60)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--oomph", default=str(ROOT / "target/release/oomph"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    all_steps = list(steps(options.oomph, options.device))
    names = [step.name for step in all_steps]
    for name in options.only:
        if name not in names:
            parser.error(f"no step is named {name}; the steps are {', '.join(names)}")
    record = Record(options.folder)
    if options.list:
        for step in all_steps:
            print(f"{step.name:32} {'done' if record.is_done(step) else 'to do'}")
        return 0
    if not shutil.which(options.oomph):
        parser.error(f"{options.oomph} is missing; build it with cargo build --release, or name it with --oomph")
    options.folder.mkdir(parents=True, exist_ok=True)
    name, driver = gpu()
    version = subprocess.run([options.oomph, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    facts = {"device": name or options.device, "driver": driver, "program": version}
    ends = time.monotonic() + options.minutes * 60
    unfinished = 0
    for step in all_steps:
        if record.is_done(step) or options.only and step.name not in options.only:
            continue
        if step.missing():
            print(f"{step.name:32} left out: {', '.join(step.missing())} not set")
            continue
        seconds = ends - time.monotonic()
        if seconds < LEAST_SECONDS:
            unfinished += 1
            continue
        unfinished += not run(step, options.folder, seconds, facts, record)
        pack(options.folder)
    print(f"{unfinished} steps are not done; call it again to go on" if unfinished else "all steps are done")
    return 1 if unfinished else 0


if __name__ == "__main__":
    sys.exit(main())
