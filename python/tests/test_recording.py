"""record() and `python -m oomph record`: with a stand-in for PyTorch in milliseconds, and with
PyTorch on the shadow GPU."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest
import shadow

import oomph

FAKE_SITE = Path(__file__).resolve().parent / "fake_site"
RANKS = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def variables(*sites: object, **more: str) -> Dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in RANKS and not name.startswith("OOMPH_")
    }
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    kept["PYTHONPATH"] = shadow.python_path(*sites)
    return {**kept, **more}


def start(folder: Path, command: List[str], env: Dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def execute(
    folder: Path, program: str, *arguments: str, **more: str
) -> "subprocess.CompletedProcess[str]":
    """Runs the text of a program with the stand-in for PyTorch. `arguments` come before the
    program."""
    (folder / "program.py").write_text(program, encoding="utf-8")
    command = [sys.executable, *arguments, "program.py"]
    process = start(folder, command, variables(FAKE_SITE, **more))
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def files(folder: Path) -> List[str]:
    return sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []


def actions(file: Path) -> List[Any]:
    snapshot = pickle.loads(file.read_bytes())
    return [(entry["action"], entry["size"]) for entry in snapshot["device_traces"][0]]


def sidecar(file: Path) -> Dict[str, Any]:
    loaded: Dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return loaded


# ---- when it is written


def test_written_at_exit_with_what_the_snapshot_lacks(tmp_path: Path) -> None:
    program = (
        "import oomph; oomph.record('mem', last=50, stacks=False)\nimport torch; torch.empty(300)\n"
    )
    done = execute(tmp_path, program, PYTORCH_ALLOC_CONF="expandable_segments:True")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "oomph: wrote mem/rank0.pickle (1 events)",
        "oomph: next: oomph advise mem/rank0.pickle",
    ]
    assert files(tmp_path / "mem") == ["rank0.json", "rank0.pickle"]
    assert actions(tmp_path / "mem/rank0.pickle") == [("alloc", 300)]
    facts = sidecar(tmp_path / "mem/rank0.json")
    written = facts.pop("written")
    assert len(written) == 20 and written.endswith("Z")
    assert facts.pop("pid") > 0 and facts.pop("program")[-1] == "program.py"
    assert facts.pop("python") == sys.version.split()[0]
    # Of the machine that runs the test.
    facts.pop("driver")
    assert facts == {
        "schema": 1,
        "oomph": "0.1.0",
        "reason": "exit",
        "rank": 0,
        "world_size": 1,
        "torch": "2.11.0",
        "cuda": "13.0",
        "nccl": None,
        "backend": "native",
        "alloc_conf": "expandable_segments:True",
        "devices": [
            {
                "index": 0,
                "name": "fake GPU",
                "total_bytes": 1000,
                "free_bytes": 700,
                "memory_fraction": 1.0,
                "limit_bytes": None,
                "allocated_bytes": 300,
                "reserved_bytes": 300,
                "peak_allocated_bytes": 300,
                "peak_reserved_bytes": 300,
                "process_bytes": None,
                "other_processes_bytes": None,
            }
        ],
        "last": 50,
        "stacks": False,
        "out_of_memory": None,
    }


def test_exception_is_still_a_recording(tmp_path: Path) -> None:
    done = execute(
        tmp_path, "import oomph, torch; oomph.record(); torch.empty(1); raise ValueError('mine')"
    )
    assert done.returncode == 1 and "ValueError: mine" in done.stderr
    assert sidecar(tmp_path / "mem/rank0.json")["reason"] == "exit"


def test_fatal_oom_keeps_the_file_of_the_oom(tmp_path: Path) -> None:
    done = execute(
        tmp_path, "import oomph, torch; oomph.record(); torch.empty(400); torch.empty(700)"
    )
    assert done.returncode == 1 and "OutOfMemoryError" in done.stderr
    assert done.stderr.count("oomph: wrote") == 1 and "when memory ran out" in done.stderr
    assert actions(tmp_path / "mem/rank0.pickle") == [("alloc", 400), ("oom", 700)]
    facts = sidecar(tmp_path / "mem/rank0.json")
    assert facts["reason"] == "oom"
    oom = {
        "device": 0,
        "requested_bytes": 700,
        "total_bytes": 1000,
        "free_bytes": 600,
        "limit_bytes": None,
    }
    assert facts["out_of_memory"] == oom


CAUGHT = """
import oomph, torch
with oomph.record({options}) as recorder:
    try:
        torch.empty(2000)
    except torch.OutOfMemoryError:
        print(recorder.path.name)
    for _ in range(3):
        torch.empty(1)
"""


def test_caught_oom_is_part_of_the_whole_recording(tmp_path: Path) -> None:
    done = execute(tmp_path, CAUGHT.format(options=""))
    assert done.returncode == 0 and done.stdout == "rank0.pickle\n"
    assert actions(tmp_path / "mem/rank0.pickle") == [
        ("oom", 2000),
        ("alloc", 1),
        ("alloc", 1),
        ("alloc", 1),
    ]
    facts = sidecar(tmp_path / "mem/rank0.json")
    assert facts["reason"] == "block" and facts["out_of_memory"]["requested_bytes"] == 2000


def test_short_history_does_not_replace_the_oom(tmp_path: Path) -> None:
    done = execute(tmp_path, CAUGHT.format(options="last=3"))
    assert "is kept as of the OOM" in done.stderr
    assert actions(tmp_path / "mem/rank0.pickle") == [("oom", 2000)]
    assert sidecar(tmp_path / "mem/rank0.json")["reason"] == "oom"


def test_many_failures_do_not_write_many_files(tmp_path: Path) -> None:
    """cuDNN tries algorithms until one has enough memory: each failure is an OOM for the
    observer."""
    program = """
import oomph, torch
oomph.record()
for number in range(1, 501):
    try:
        torch.empty(1000 + number)
    except torch.OutOfMemoryError:
        pass
"""
    done = execute(tmp_path, program)
    assert 1 <= done.stderr.count("when memory ran out") < 250
    # The end is written, though nothing was allocated since the first failure.
    assert len(actions(tmp_path / "mem/rank0.pickle")) == 500
    assert sidecar(tmp_path / "mem/rank0.json")["out_of_memory"]["requested_bytes"] == 1500


def test_handler_of_the_program_may_call_this_one(tmp_path: Path) -> None:
    program = """
import oomph, torch, os, signal
oomph.record()
torch.empty(1)
before = signal.getsignal(signal.SIGTERM)
def handler(number, frame):
    print("mine", flush=True)
    before(number, frame)
signal.signal(signal.SIGTERM, handler)
with oomph.record("second"):
    os.kill(os.getpid(), signal.SIGTERM)
"""
    done = execute(tmp_path, program)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "mine\n")
    assert [sidecar(tmp_path / name / "rank0.json")["reason"] for name in ("mem", "second")] == [
        "sigterm"
    ] * 2


def test_only_the_occasions_that_were_named(tmp_path: Path) -> None:
    execute(tmp_path, "import oomph, torch\nwith oomph.record(when=('oom',)): torch.empty(1)")
    assert files(tmp_path / "mem") == []
    execute(
        tmp_path,
        "import oomph, torch; oomph.record(when='exit'); torch.empty(1); torch.empty(5000)",
    )
    assert sidecar(tmp_path / "mem/rank0.json")["reason"] == "exit"


def test_sigterm_writes_and_ends_the_program(tmp_path: Path) -> None:
    program = "import oomph, torch, os, signal; oomph.record(); torch.empty(7); os.kill(os.getpid(), signal.SIGTERM)"
    done = execute(tmp_path, program)
    assert done.returncode == -signal.SIGTERM
    assert "on SIGTERM" in done.stderr
    assert sidecar(tmp_path / "mem/rank0.json")["reason"] == "sigterm"


def test_sigterm_reaches_the_handler_of_the_program(tmp_path: Path) -> None:
    program = """
import oomph, torch, os, signal, sys
oomph.record()
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"mine {number}"))
torch.empty(7)
os.kill(os.getpid(), signal.SIGTERM)
"""
    done = execute(tmp_path, program)
    assert done.returncode == 1 and done.stderr.endswith("mine 15\n")
    # Nothing was requested after the signal, so the file is not written again at exit.
    assert sidecar(tmp_path / "mem/rank0.json")["reason"] == "sigterm"


def test_sigterm_waits_for_a_file_that_is_being_written(tmp_path: Path) -> None:
    program = "import oomph, torch; r = oomph.record(); torch.empty(7); r.save(); print('went on')"
    done = execute(tmp_path, program, FAKE_TORCH_SIGNAL=str(int(signal.SIGTERM)))
    assert done.returncode == -signal.SIGTERM and done.stdout == ""
    assert files(tmp_path / "mem") == ["rank0.json", "rank0.pickle"]
    assert actions(tmp_path / "mem/rank0.pickle") == [("alloc", 7)]


def test_failure_to_write_does_not_end_the_program(tmp_path: Path) -> None:
    program = """
import oomph, torch, os
with oomph.record("mem"):
    torch.empty(7)
    os.rmdir("mem")
    open("mem", "w").close()
print("went on")
"""
    done = execute(tmp_path, program)
    assert done.returncode == 0 and done.stdout == "went on\n"
    assert "oomph: the recording could not be written: FileExistsError" in done.stderr


def test_save_replaces_its_own_file(tmp_path: Path) -> None:
    program = """
import oomph, torch
recorder = oomph.record("mem")
try:
    recorder.save()
except oomph.OomphError as error:
    print(error)
torch.empty(1)
first = recorder.save()
torch.empty(2)
assert recorder.save() == first == recorder.path
recorder.stop()
torch.empty(3)
"""
    done = execute(tmp_path, program)
    assert done.stdout == "there is nothing to write: the program did not use a GPU\n"
    assert done.stderr.count("oomph: wrote") == 2
    assert files(tmp_path / "mem") == ["rank0.json", "rank0.pickle"]
    assert actions(tmp_path / "mem/rank0.pickle") == [("alloc", 1), ("alloc", 2)]
    assert sidecar(tmp_path / "mem/rank0.json")["reason"] == "request"


@pytest.mark.parametrize("arguments", ["last=0", "when=('ooms',)"])
def test_wrong_arguments(tmp_path: Path, arguments: str) -> None:
    done = execute(tmp_path, f"import oomph; oomph.record({arguments})")
    assert done.returncode == 1 and "ValueError" in done.stderr and files(tmp_path / "mem") == []


# ---- how it begins


@pytest.mark.parametrize(
    "order", ["import oomph; oomph.record()\nimport torch", "import torch, oomph; oomph.record()"]
)
def test_program_initialises_cuda(tmp_path: Path, order: str) -> None:
    done = execute(tmp_path, f"{order}\nprint(torch.calls)\ntorch.empty(1)\nprint(torch.calls)")
    before, after = done.stdout.splitlines()
    assert before == "[]"
    assert after == f"['init', ('alloc', 'python', {1 << 40}, True), 'start']"
    assert actions(tmp_path / "mem/rank0.pickle") == [("alloc", 1)]


def test_recording_begins_in_the_middle(tmp_path: Path) -> None:
    execute(tmp_path, "import torch, oomph; torch.empty(1); oomph.record(); torch.empty(2)")
    assert actions(tmp_path / "mem/rank0.pickle") == [("alloc", 2)]


def test_pytorch_2_0_records_each_device(tmp_path: Path) -> None:
    program = "import oomph, torch\nwith oomph.record(last=9): torch.empty(1)\nprint(torch.calls)"
    done = execute(tmp_path, program, FAKE_TORCH="2.0")
    began = "(0, True, 9, True), 'start', (1, True, 9, True)"
    assert done.stdout == f"['init', {began}, (0, False, 1, False), 'stop', (1, False, 1, False)]\n"
    assert actions(tmp_path / "mem/rank0.pickle") == [("alloc", 1)]


def test_pytorch_2_0_and_the_recorder_of_the_program(tmp_path: Path) -> None:
    program = """
import oomph, torch
torch.cuda.init()
torch._C._cuda_recordMemoryHistory(True, True, False, {entries}, True)
torch.empty(1)
torch.empty(2)
with oomph.record("mem"):
    torch.empty(3)
"""
    execute(tmp_path, program.format(entries=5), FAKE_TORCH="2.0")
    assert actions(tmp_path / "mem/rank0.pickle") == [("alloc", 1), ("alloc", 2), ("alloc", 3)]
    # Its default keeps one event, which is no history.
    execute(tmp_path, program.format(entries=1), FAKE_TORCH="2.0")
    assert actions(tmp_path / "mem/rank0-2.pickle") == [("alloc", 3)]


@pytest.mark.parametrize("when, reason", [("('oom', 'exit')", "block"), ("'oom'", "oom")])
def test_oom_of_which_pytorch_does_not_tell(tmp_path: Path, when: str, reason: str) -> None:
    """PyTorch 2.1 to 2.3 with several devices: an observer would break the OOM of the others."""
    program = f"""
import oomph, torch
with oomph.record(when={when}) as recorder:
    torch.empty(400)
    print(recorder.ran_out)
    try:
        torch.empty(700)
    except torch.OutOfMemoryError:
        print(recorder.ran_out)
"""
    done = execute(tmp_path, program, FAKE_TORCH="2.1")
    assert (done.returncode, done.stdout) == (0, "False\nTrue\n"), done.stderr
    assert actions(tmp_path / "mem/rank0.pickle") == [("alloc", 400), ("oom", 700)]
    facts = sidecar(tmp_path / "mem/rank0.json")
    assert facts["reason"] == reason
    assert facts["out_of_memory"] == {
        "device": 0,
        "requested_bytes": 700,
        "total_bytes": 1000,
        "free_bytes": 600,
        "limit_bytes": None,
    }


def test_without_an_oom_there_is_no_file_of_an_oom(tmp_path: Path) -> None:
    program = "import oomph, torch\nwith oomph.record(when='oom'): torch.empty(1)"
    execute(tmp_path, program, FAKE_TORCH="2.1")
    assert files(tmp_path / "mem") == []


def test_memory_fraction_is_remembered(tmp_path: Path) -> None:
    program = "import oomph, torch; oomph.record(); torch._C._cuda_setMemoryFraction(0.25, 0); torch.empty(1)"
    execute(tmp_path, program)
    device = sidecar(tmp_path / "mem/rank0.json")["devices"][0]
    assert (device["memory_fraction"], device["limit_bytes"]) == (0.25, 250)


def test_recorder_of_the_program_is_left_as_it_is(tmp_path: Path) -> None:
    program = """
import oomph, torch
torch.cuda.init()
torch.cuda.memory._record_memory_history(max_entries=4)
torch.empty(1)
with oomph.record("mem"):
    torch.empty(2)
print(torch.calls.count("start"), torch.calls.count("stop"))
"""
    assert execute(tmp_path, program).stdout == "1 0\n"
    assert actions(tmp_path / "mem/rank0.pickle") == [("alloc", 1), ("alloc", 2)]


def test_second_and_nested_recorders(tmp_path: Path) -> None:
    program = """
import oomph, torch
with oomph.record("mem") as outer:
    torch.empty(1)
    with oomph.record("mem") as inner:
        torch.empty(2)
    torch.empty(3)
torch.empty(4)
with oomph.record("mem") as second:
    torch.empty(5)
print(inner.path.name, outer.path.name, second.path.name)
print(torch.calls.count("start"), torch.calls.count("stop"))
"""
    done = execute(tmp_path, program)
    assert done.stdout == "rank0.pickle rank0-2.pickle rank0-3.pickle\n2 2\n"
    assert actions(tmp_path / "mem/rank0.pickle") == [("alloc", 1), ("alloc", 2)]
    assert actions(tmp_path / "mem/rank0-2.pickle") == [("alloc", 1), ("alloc", 2), ("alloc", 3)]
    # Without the request between the two: the history was off, and begins anew.
    assert actions(tmp_path / "mem/rank0-3.pickle") == [("alloc", 5)]


@pytest.mark.parametrize(
    "program, kind, why",
    [
        ("import oomph; oomph.record()", "", "PyTorch was not imported"),
        ("import oomph, torch; oomph.record()", "", "the program did not use a GPU"),
        (
            "import oomph, torch; oomph.record(); torch.cuda.init()",
            "",
            "nothing was allocated on a GPU",
        ),
        ("import oomph, torch; oomph.record()", "cpu", "PyTorch 2.11.0 is built without CUDA"),
        (
            "import oomph; oomph.record()\ntry:\n    import torch\nexcept OSError: pass",
            "broken",
            "PyTorch could not be imported",
        ),
        ("import oomph\nwith oomph.record(): pass", "", "PyTorch was not imported"),
    ],
)
def test_nothing_to_write_is_one_line(tmp_path: Path, program: str, kind: str, why: str) -> None:
    done = execute(tmp_path, program, FAKE_TORCH=kind)
    assert done.returncode == 0
    assert done.stderr == f"oomph: no recording was written: {why}\n"
    assert files(tmp_path / "mem") == []


def test_missing_pytorch(tmp_path: Path) -> None:
    program = "import oomph; oomph.record()\ntry:\n    import torch\nexcept ImportError:\n    print('missing')"
    (tmp_path / "program.py").write_text(program)
    # -S: nothing that is installed for this Python is found. The package is linked elsewhere.
    site = tmp_path / "site"
    site.mkdir()
    (site / "oomph").symlink_to(Path(oomph.__file__).parent)
    process = start(tmp_path, [sys.executable, "-S", "program.py"], variables(site))
    out, err = process.communicate(timeout=60)
    assert (out, err) == (
        "missing\n",
        "oomph: no recording was written: PyTorch is not installed\n",
    )


# ---- processes


def test_forked_process_writes_nothing(tmp_path: Path) -> None:
    program = """
import oomph, torch, os, sys
oomph.record()
torch.empty(1)
child = os.fork()
if child == 0:
    torch.empty(2)
    sys.exit(0)
os.waitpid(child, 0)
torch.empty(3)
"""
    done = execute(tmp_path, program)
    assert done.stderr.count("oomph: wrote") == 1
    assert files(tmp_path / "mem") == ["rank0.json", "rank0.pickle"]
    assert actions(tmp_path / "mem/rank0.pickle") == [("alloc", 1), ("alloc", 3)]


WORKERS = """
import multiprocessing
def work(size):
    import torch
    torch.empty(size)
if __name__ == "__main__":
    context = multiprocessing.get_context("{kind}")
    workers = [context.Process(target=work, args=(size,)) for size in (11, 22)]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    print([worker.exitcode for worker in workers])
"""


@pytest.mark.parametrize("kind", ["spawn", "fork"])
def test_workers_write_their_own_files(tmp_path: Path, kind: str) -> None:
    done = execute(tmp_path, WORKERS.format(kind=kind), "-m", "oomph", "record", "--output", "here")
    assert done.returncode == 0 and done.stdout == "[0, 0]\n"
    # The process that only starts workers does not say that it recorded nothing.
    assert "no recording" not in done.stderr
    assert files(tmp_path / "here") == [
        "rank0-2.json",
        "rank0-2.pickle",
        "rank0.json",
        "rank0.pickle",
    ]
    found = [actions(tmp_path / "here" / name) for name in ("rank0.pickle", "rank0-2.pickle")]
    assert sorted(found) == [[("alloc", 11)], [("alloc", 22)]]


def test_processes_of_one_rank_never_share_a_file(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import sys, oomph, torch; oomph.record(); torch.empty(int(sys.argv[1]))"
    )
    sizes = range(1, 13)
    command = [sys.executable, "program.py"]
    running = [start(tmp_path, [*command, str(size)], variables(FAKE_SITE)) for size in sizes]
    for process in running:
        process.communicate(timeout=60)
    pickles = sorted((tmp_path / "mem").glob("*.pickle"))
    assert sorted(actions(file)[0][1] for file in pickles) == list(sizes)
    for file in pickles:
        # The sidecar belongs to the same process.
        assert (
            sidecar(file.with_suffix(".json"))["devices"][0]["allocated_bytes"]
            == actions(file)[0][1]
        )
    assert len(files(tmp_path / "mem")) == 2 * len(sizes)


def test_ranks(tmp_path: Path) -> None:
    program = (
        "import oomph, torch; oomph.record(); torch.empty(1); torch.empty(5000 if {oom} else 1)"
    )
    said = {}
    for rank in ("0", "1", "2"):
        done = execute(tmp_path, program.format(oom=rank == "2"), RANK=rank, WORLD_SIZE="3")
        said[rank] = [line for line in done.stderr.splitlines() if line.startswith("oomph")]
    assert said["0"] == [
        "oomph: wrote mem/rank0.pickle (2 events)",
        "oomph: next: oomph advise mem/",
    ]
    assert said["1"] == []
    assert said["2"] == ["oomph: wrote mem/rank2.pickle (2 events) when memory ran out"]
    facts = sidecar(tmp_path / "mem/rank1.json")
    assert (facts["rank"], facts["world_size"]) == (1, 3)
    again = execute(tmp_path, program.format(oom=False), RANK="0", WORLD_SIZE="3").stderr
    assert "oomph: next: oomph advise 'mem/rank*-2.pickle'" in again


# ---- python -m oomph record

FACTS = """
import __main__, json, os, sys, torch
torch.empty(1)
print(json.dumps([sys.argv, sys.path, __name__, __main__.__dict__.get("__package__"), sys.flags.optimize]))
sys.exit(7)
"""


def test_recorded_program_is_as_it_was(tmp_path: Path) -> None:
    plain = execute(tmp_path, FACTS, "-O")
    recorded = execute(tmp_path, FACTS, "-O", "-m", "oomph", "record", "--last", "5")
    assert plain.returncode == recorded.returncode == 7
    assert json.loads(recorded.stdout) == json.loads(plain.stdout)
    assert files(tmp_path / "mem") == ["rank0.json", "rank0.pickle"]
    assert sidecar(tmp_path / "mem/rank0.json")["last"] == 5


def test_module_and_options_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(
        "import sys, torch; torch.empty(1); print(sys.argv[1:], __name__)"
    )
    command = [
        sys.executable,
        "-m",
        "oomph",
        "record",
        "--no-stacks",
        "-m",
        "training",
        "--last",
        "x",
        "-h",
    ]
    out, _ = start(tmp_path, command, variables(FAKE_SITE)).communicate(timeout=60)
    assert out == "['--last', 'x', '-h'] __main__\n"
    assert sidecar(tmp_path / "mem/rank0.json")["stacks"] is False


# What `oomph rehearse` does: it leaves the search path, its finder asks all others and deletes what
# it added to the loader, and it runs the next sitecustomize.
OTHER_SITECUSTOMIZE = """
import importlib.util, os, sys
from importlib.machinery import PathFinder
sys.path.remove(os.path.dirname(__file__))
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(spec for spec in found if spec is not None)
        original = spec.loader.exec_module
        def exec_module(module):
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
            del spec.loader.exec_module
            print("before torch")
            original(module)
            print("after torch")
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder())
spec = PathFinder.find_spec("sitecustomize", sys.path)
if spec is not None:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""


@pytest.mark.parametrize("is_first", [True, False])
def test_other_sitecustomize(tmp_path: Path, is_first: bool) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text(OTHER_SITECUSTOMIZE)
    (tmp_path / "program.py").write_text("import torch; torch.empty(1)")
    bootstrap = Path(oomph.__file__).parent / "bootstrap"
    sites = (other, bootstrap) if is_first else (bootstrap, other)
    env = variables(*sites, FAKE_SITE, OOMPH_RECORD_FOLDER=str(tmp_path / "mem"))
    command = [sys.executable, "program.py"]
    out, err = start(tmp_path, command, env).communicate(timeout=60)
    assert out.count("before torch") == out.count("after torch") == 1, err
    assert actions(tmp_path / "mem/rank0.pickle") == [("alloc", 1)]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the program is missing"),
        (["--last", "0", "x.py"], "--last 0 would record nothing"),
        (["--output", "program.py/x", "x.py"], "--output program.py/x: Not a directory"),
    ],
)
def test_wrong_command_line(tmp_path: Path, arguments: List[str], message: str) -> None:
    (tmp_path / "program.py").write_text("")
    process = start(tmp_path, [sys.executable, "-m", "oomph", "record", *arguments], variables())
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and message in err


# ---- PyTorch on the shadow GPU

TRAINING = """
import torch
model = torch.nn.Linear(1024, 1024).cuda()
for step in range(3):
    model(torch.randn(64, 1024, device="cuda")).sum().backward()
    model.zero_grad()
kept = []
while True:
    kept.append(torch.empty((1 << 30) + 512, dtype=torch.uint8, device="cuda"))
"""
# Not a multiple of 2 MiB, to which PyTorch rounds segments.
REQUEST = (1 << 30) + 512


def test_oom_of_pytorch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    command = [
        shadow.binary(),
        "rehearse",
        "--card",
        "4GiB",
        "--output",
        "rehearsal",
        "--",
        sys.executable,
    ]
    command += ["-m", "oomph", "record", "train.py"]
    done = shadow.run(command, tmp_path, shadow.environment(shadow.torch_site()))
    assert done.returncode == 108, done.stdout
    assert (
        "oomph: wrote mem/rank0.pickle" in done.stdout
        and "OutOfMemoryError: CUDA out of memory" in done.stdout
    )
    facts = sidecar(tmp_path / "mem/rank0.json")
    assert facts["reason"] == "oom" and facts["torch"].startswith("2.")
    assert facts["out_of_memory"]["requested_bytes"] == REQUEST
    (device,) = facts["devices"]
    assert device["total_bytes"] == 4 << 30 and device["memory_fraction"] in (1.0, None)
    # The rehearsal writes its own file in its own way.
    ours, theirs = (
        actions(tmp_path / "mem/rank0.pickle"),
        actions(tmp_path / "rehearsal/rank-0.pickle"),
    )
    requests = [entry for entry in theirs if entry[0] in ("alloc", "oom")]
    assert [entry for entry in ours if entry[0] in ("alloc", "oom")] == requests and requests[
        -1
    ] == ("oom", REQUEST)
    advice = shadow.run([shadow.binary(), "advise", "mem/rank0.pickle"], tmp_path)
    assert "it ran out of memory" in advice.stdout and "train.py:9" in advice.stdout


OTHER_DEVICE = (
    shadow.RECORDER_IS_OFF
    + """
import oomph
from oomph.recording import release
if (2, 1) <= release(torch) < (2, 4):
    # What the rehearsal attaches makes an OOM of the second device another error.
    torch._C._cuda_attach_out_of_memory_observer = lambda observer: None
with oomph.record("mem") as recorder:
    torch.cuda.set_device(1)
    kept = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    try:
        torch.empty((8 << 30) + 512, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        print("ran out:", recorder.ran_out)
"""
)


def test_oom_of_another_device(tmp_path: Path) -> None:
    """As in the ranks of torchrun: CUDA is initialised while the first device is selected."""
    (tmp_path / "program.py").write_text(OTHER_DEVICE)
    command = [
        shadow.binary(),
        "rehearse",
        "--card",
        "4GiB",
        "--gpus",
        "2",
        "--output",
        "rehearsal",
    ]
    command += ["--", sys.executable, "program.py"]
    done = shadow.run(command, tmp_path, shadow.environment(shadow.torch_site()))
    assert "ran out: True" in done.stdout, done.stdout
    snapshot = pickle.loads((tmp_path / "mem/rank0.pickle").read_bytes())
    found = [(entry["action"], entry["size"]) for entry in snapshot["device_traces"][1]]
    assert ("alloc", 1 << 20) in found and ("oom", (8 << 30) + 512) in found
    facts = sidecar(tmp_path / "mem/rank0.json")["out_of_memory"]
    assert (facts["device"], facts["requested_bytes"]) == (1, (8 << 30) + 512)
    assert facts["total_bytes"] == 4 << 30 and facts["limit_bytes"] is None
    assert 3 << 30 < facts["free_bytes"] < 4 << 30


def test_recorder_does_not_end_a_rehearsal(tmp_path: Path) -> None:
    program = """
import oomph, torch
with oomph.record("mem"):
    first = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
second = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
"""
    done = shadow.rehearse(program, tmp_path, "4GiB")
    assert done.returncode == 0, done.stdout
    ours, theirs = (
        [size for action, size in actions(tmp_path / name) if action == "alloc"]
        for name in ("mem/rank0.pickle", "rehearsal/rank-0.pickle")
    )
    assert (ours, theirs) == ([3 << 20], [3 << 20, 5 << 20])
