"""The pytest plugin: sessions on the shadow GPU and without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest
import shadow

from oomph.pytest_plugin import parse_size, sites_at_peak
from oomph.sizes import show_size

PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("2GiB", 2 << 30),
        ("500MB", 500_000_000),
        ("500 mb", 500_000_000),
        ("1.5GiB", 3 << 29),
        ("4k", 4_000),
        ("4ki", 4096),
        ("7", 7),
        (1 << 20, 1 << 20),
    ],
)
def test_sizes_are_those_of_the_command_line(text: Any, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 apples", "nan", "1e9", None, True])
def test_other_texts_are_not_sizes(text: Any) -> None:
    with pytest.raises(ValueError, match="is not an amount of memory"):
        parse_size(text)


def test_shown_sizes_have_three_digits() -> None:
    shown = [show_size(size) for size in (0, 1023, 1536, 20 << 20, 3 << 29, 200 << 30)]
    assert shown == ["0 B", "1023 B", "1.50 KiB", "20.0 MiB", "1.50 GiB", "200 GiB"]


def test_call_sites_at_the_peak_are_those_of_the_test() -> None:
    def event(action: str, address: int, size: int, line: int, time: int) -> Dict[str, Any]:
        frames = [{"filename": "/x/t.py", "line": line, "name": "f"}]
        return {"action": action, "addr": address, "size": size, "frames": frames, "time_us": time}

    events = [
        event("alloc", 1, 10, 1, 0),
        event("alloc", 2, 900, 2, 1),
        event("free_requested", 2, 900, 2, 2),
        # The test begins here: the peak of 910 before it does not count.
        event("alloc", 3, 50, 3, 10),
        event("alloc", 2, 60, 4, 11),
        event("free_requested", 3, 50, 3, 12),
        event("alloc", 4, 20, 5, 13),
    ]
    found = sites_at_peak({"device_traces": [[], events]}, 1, 10)
    assert found == {"/x/t.py:1 f": 10, "/x/t.py:3 f": 50, "/x/t.py:4 f": 60}


def session(folder: Path, tests: str, arguments: List[str]) -> "subprocess.CompletedProcess[str]":
    (folder / "test_gpu.py").write_text(tests, encoding="utf-8")
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = -p oomph.pytest_plugin --strict-markers\n"
    )
    return shadow.run([*PYTEST, *arguments], folder, shadow.environment(shadow.torch_site()))


ALLOCATION = "return torch.empty("


def line_of(tests: str, text: str) -> int:
    return next(number for number, line in enumerate(tests.splitlines(), 1) if text in line)


MARKED = (
    shadow.RECORDER_IS_OFF
    + """
import pytest

kept = []
runs = []
MIB = 1 << 20

def memory(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")

@pytest.mark.gpu_memory_limit("64MiB")
def test_within_limit():
    memory(64 * MIB)

@pytest.mark.gpu_memory_limit("64MiB")
def test_beyond_limit():
    first = memory(32 * MIB)
    second = memory(48 * MIB)

@pytest.mark.gpu_memory_limit("64MiB")
def test_within_limit_again():
    memory(MIB)

@pytest.mark.gpu_memory_limit("64MiB", kind="reserved")
def test_reserves_more_than_it_allocates():
    for size in (30, 40, 50):
        memory(size * MIB)

@pytest.mark.gpu_leaks(max_growth="1MiB", runs=4)
def test_leak():
    kept.append(memory(8 * MIB))

@pytest.mark.gpu_leaks(max_growth="16MiB")
def test_leak_that_is_allowed():
    runs.append(0)
    kept.append(memory(8 * MIB))

def test_number_of_runs():
    assert len(runs) == 5

@pytest.mark.gpu_leaks
def test_no_leak():
    layer = torch.nn.Linear(256, 256).cuda()
    layer(torch.zeros(8, 256, device="cuda")).sum().backward()
    cycle = [memory(4 * MIB)]
    cycle.append(cycle)

@pytest.mark.gpu_leaks
def test_fails_in_a_later_run():
    runs.append(1)
    memory(MIB)
    assert runs.count(1) < 3

@pytest.mark.gpu_memory_limit("plenty")
def test_wrong_size():
    memory(MIB)
"""
)


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("marked")
    # The word after the option is a path and not a card: this file is not run.
    (folder / "test_other.py").write_text("def test_other():\n    assert False\n")
    ran = session(folder, MARKED, ["-rA", "--oomph-rehearse", "test_gpu.py"])
    assert ran.returncode == 1, ran.stdout
    return ran.stdout


def test_limit_is_compared_with_the_peak_of_the_test(marked: str) -> None:
    assert "PASSED test_gpu.py::test_within_limit\n" in marked
    assert "PASSED test_gpu.py::test_within_limit_again\n" in marked
    message = "80.0 MiB allocated at the peak on device 0; the limit is 64.0 MiB: 16.0 MiB too much"
    assert message in marked
    lines = marked.split(message)[1].splitlines()[1:4]
    assert lines[0] == "allocated at the peak, by call site:"
    assert lines[1].split() == [
        "80.0",
        "MiB",
        f"test_gpu.py:{line_of(MARKED, ALLOCATION)}",
        "memory",
    ]


def test_limit_can_be_for_reserved_memory(marked: str) -> None:
    assert (
        "120 MiB reserved at the peak on device 0; the limit is 64.0 MiB: 56.0 MiB too much"
        in marked
    )


def test_leak_is_found_with_its_call_site(marked: str) -> None:
    message = marked.split(
        "each run leaves 8.00 MiB allocated on device 0; max_growth is 1.00 MiB"
    )[1]
    lines = message.splitlines()
    assert lines[1].startswith("allocated after runs 1 to 4: ") and lines[1].count("->") == 3
    assert lines[2] == "growth in one more run, by call site:"
    assert lines[3].split() == [
        "8.00",
        "MiB",
        f"test_gpu.py:{line_of(MARKED, ALLOCATION)}",
        "memory",
    ]


def test_tests_without_a_leak_pass(marked: str) -> None:
    for name in ("test_leak_that_is_allowed", "test_number_of_runs", "test_no_leak"):
        assert f"PASSED test_gpu.py::{name}" in marked


def test_failing_run_is_numbered(marked: str) -> None:
    assert "FAILED test_gpu.py::test_fails_in_a_later_run" in marked
    assert "This happened in run 3 of 5" in marked


def test_wrong_size_fails_the_test(marked: str) -> None:
    assert "ValueError: 'plenty' is not an amount of memory" in marked
    assert "5 failed, 5 passed" in marked


UNMARKED = (
    shadow.RECORDER_IS_OFF
    + """
import pytest

kept = []

def memory(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")

@pytest.fixture(scope="module")
def model():
    return memory(5 << 20)

@pytest.fixture
def batch():
    return memory(6 << 20)

def test_no_gpu():
    pass

def test_fixtures_are_not_leaks(model, batch):
    memory(7 << 20)

def test_first_product(model):
    torch.zeros(64, 64, device="cuda") @ torch.zeros(64, 64, device="cuda")

def test_keeps_a_tensor(model, batch):
    kept.append(memory(4 << 20))

def test_failed_test_is_not_judged():
    here = memory(4 << 20)
    assert False

def test_memory_runs_out():
    with pytest.raises(torch.cuda.OutOfMemoryError):
        memory(100 << 30)
    assert float(torch.zeros(1000, device="cuda").exp().sum()) == 0.0
"""
)


@pytest.fixture(scope="module")
def unmarked(tmp_path_factory: pytest.TempPathFactory) -> str:
    # PyTorch before 2.3 warns about a new NumPy.
    arguments = ["--oomph-rehearse=24GiB", "--oomph-fail-on-leak", "-rA", "-p", "no:warnings"]
    return session(tmp_path_factory.mktemp("unmarked"), UNMARKED, arguments).stdout


def test_option_finds_the_test_that_leaks(unmarked: str) -> None:
    assert "1 failed, 5 passed, 1 error" in unmarked
    assert "ERROR at teardown of test_keeps_a_tensor" in unmarked
    message = unmarked.split(
        "--oomph-fail-on-leak: 4.00 MiB more are allocated on device 0 than before the test"
    )[1]
    assert message.splitlines()[2].split() == [
        "4.00",
        "MiB",
        f"test_gpu.py:{line_of(UNMARKED, ALLOCATION)}",
        "memory",
    ]


def test_rehearsal_says_what_is_not_real(unmarked: str) -> None:
    assert "oomph: rehearsed on 24GiB: peak " in unmarked
    after = unmarked.split(
        "values that were computed on the GPU are not known. They were read here:"
    )[1]
    assert after.splitlines()[1].endswith(
        f"test_gpu.py:{line_of(UNMARKED, 'float(')} test_memory_runs_out"
    )


PASSING = """
import sys, pytest, torch

def test_memory_runs_out():
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(100 << 30, dtype=torch.uint8, device="cuda")

def test_other():
    print("the output of the test")
"""


def test_exit_code_and_output_are_those_of_pytest(tmp_path: Path) -> None:
    # `oomph rehearse` itself ends with 108 after an OOM.
    ran = session(tmp_path, PASSING, ["-s", "--oomph-rehearse=24GiB"])
    assert ran.returncode == 0, ran.stdout
    assert "the output of the test" in ran.stdout and "2 passed" in ran.stdout
    assert not (tmp_path / "results").exists()


def test_errors_of_the_option(tmp_path: Path) -> None:
    ran = session(tmp_path, PASSING, ["--oomph-rehearse=no-such-card"])
    assert ran.returncode != 0 and "unknown card 'no-such-card'" in ran.stdout, ran.stdout
    ran = session(tmp_path, PASSING, ["--oomph-rehearse=8GiB,24GiB"])
    assert ran.returncode == 4 and "the tests run on one card" in ran.stdout
    ran = session(tmp_path, PASSING, ["--oomph-rehearse", "24GiB"])
    assert ran.returncode == 4
    assert "no file 24GiB; if it is a card: --oomph-rehearse=24GiB" in ran.stdout
    ran = session(tmp_path, PASSING, ["--oomph-rehearse=24GiB", "missing.py"])
    assert ran.returncode == 4 and "file or directory not found: missing.py" in ran.stdout


def test_marked_tests_are_skipped_without_a_gpu(tmp_path: Path) -> None:
    tests = (
        "import pytest\n@pytest.mark.gpu_memory_limit('1GiB')\ndef test_gpu():\n    assert False\n"
    )
    (tmp_path / "torch").mkdir()
    stand_in = tmp_path / "torch" / "__init__.py"
    stand_in.write_text(
        "class cuda:\n    is_available = is_initialized = staticmethod(lambda: False)\n"
    )
    (tmp_path / "test_gpu.py").write_text(tests, encoding="utf-8")
    command = [
        *PYTEST,
        "-p",
        "oomph.pytest_plugin",
        "--strict-markers",
        "--oomph-fail-on-leak",
        "-rs",
    ]
    ran = shadow.run(command, tmp_path, shadow.environment(str(tmp_path)))
    assert ran.returncode == 0 and "1 skipped" in ran.stdout, ran.stdout
    assert "there is no GPU; `pytest --oomph-rehearse` runs this test without a GPU" in ran.stdout
    stand_in.write_text("raise ImportError('libcudart.so.13')")
    ran = shadow.run(command, tmp_path, shadow.environment(str(tmp_path)))
    assert (
        "PyTorch cannot be imported (ImportError); `pytest --oomph-rehearse` runs" in ran.stdout
    ), ran.stdout


# The decorator of pluggy before 1.2 has no argument `wrapper`.
OLD_PYTEST = """
import sys, pytest
marker = pytest.hookimpl
def hookimpl(function=None, hookwrapper=False, optionalhook=False, tryfirst=False, trylast=False):
    return marker(function, hookwrapper, optionalhook, tryfirst, trylast)
pytest.hookimpl = hookimpl
import oomph.pytest_plugin
pytest.hookimpl = marker
sys.exit(pytest.main(["-p", "no:cacheprovider", "-p", "oomph.pytest_plugin", *sys.argv[1:]]))
"""


def test_sessions_of_an_old_pytest_are_not_broken(tmp_path: Path) -> None:
    tests = "import pytest\ndef test_other(): pass\n@pytest.mark.gpu_leaks\ndef test_gpu(): pass\n"
    (tmp_path / "test_gpu.py").write_text(tests, encoding="utf-8")
    command = [sys.executable, "-c", OLD_PYTEST]
    ran = shadow.run([*command, "-k", "other"], tmp_path, shadow.environment())
    assert ran.returncode == 0 and "1 passed" in ran.stdout, ran.stdout
    # What is not checked does not pass.
    ran = shadow.run(command, tmp_path, shadow.environment())
    assert "1 error" in ran.stdout and "need pytest 8 or newer" in ran.stdout, ran.stdout
    for option in ("--oomph-fail-on-leak", "--oomph-rehearse=24GiB"):
        ran = shadow.run([*command, option], tmp_path, shadow.environment())
        assert ran.returncode == 4 and "need pytest 8 or newer" in ran.stdout, ran.stdout
