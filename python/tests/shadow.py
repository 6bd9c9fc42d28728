"""Runs programs on the shadow GPU for the tests. What is missing skips the test, with a reason.

OOMPH_BINARY: the program; default: target/release/oomph of this repository.
OOMPH_TORCH_SITE: a folder with PyTorch; default: target/rehearse-site (see tools/shadow/site.sh).
OOMPH_INSTALLED: test the installed package.
OOMPH_HF_SITE: a folder with transformers, accelerate, lightning and what they need besides PyTorch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Dict, List, Optional, Tuple

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "python"
# Whether the package of this Python is tested, and not that of the repository.
INSTALLED = bool(os.environ.get("OOMPH_INSTALLED"))

# A rehearsal records all the time. These lines make PyTorch's recorder what it is on a GPU: off
# until it is started.
RECORDER_IS_OFF = """
import torch
from oomph.recording import disable

record = torch.cuda.memory._record_memory_history.__self__.own_record
torch.cuda.memory._record_memory_history = record
torch.cuda._lazy_call(lambda: disable(torch))
"""


def binary() -> str:
    path = os.environ.get("OOMPH_BINARY") or str(REPOSITORY / "target" / "release" / "oomph")
    if not os.path.isfile(path):
        pytest.skip(f"{path} is missing: cargo build --release, or set OOMPH_BINARY")
    return path


def library(monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of `liboomph.so`, in the package or beside the program."""
    from oomph.allocator import find_library
    from oomph.binary import OomphError

    monkeypatch.setenv("OOMPH_BINARY", binary())
    try:
        return find_library()
    except OomphError as error:
        pytest.skip(str(error))


def torch_site() -> str:
    path = os.environ.get("OOMPH_TORCH_SITE") or str(REPOSITORY / "target" / "rehearse-site")
    if not os.path.isdir(os.path.join(path, "torch")):
        pytest.skip(
            f"there is no PyTorch in {path}: run tools/shadow/site.sh, or set OOMPH_TORCH_SITE"
        )
    if not os.path.isfile(
        os.path.join(path, "torch", f"_C{sysconfig.get_config_var('EXT_SUFFIX')}")
    ):
        pytest.skip(f"the PyTorch in {path} is for another version of Python")
    return path


def torch_release() -> Tuple[int, int]:
    """The release of the PyTorch in the site, such as (2, 11). It is not imported."""
    text = Path(torch_site(), "torch", "version.py").read_text(encoding="utf-8")
    found = re.search(r"^__version__ = '(\d+)\.(\d+)", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1]), int(found[2])


def skip_before(release: Tuple[int, int], why: str) -> None:
    """Skips a test that cannot apply to older releases of PyTorch."""
    found = torch_release()
    if found < release:
        needed, present = (".".join(map(str, one)) for one in (release, found))
        pytest.skip(f"PyTorch {present}: {why} needs {needed} or later")


def hf_site(package: str) -> str:
    path = os.environ.get("OOMPH_HF_SITE", "")
    if not os.path.isdir(os.path.join(path, package)):
        pytest.skip(f"there is no {package} in OOMPH_HF_SITE={path}")
    return path


def python_path(*sites: object) -> str:
    """PYTHONPATH for the package and packages in these folders. An installed one is found anyway."""
    package: List[object] = [] if INSTALLED else [PACKAGE]
    return os.pathsep.join(str(site) for site in (*package, *sites))


def environment(*sites: str) -> Dict[str, str]:
    """The variables of a program that finds this package, and packages in these folders."""
    pytest_variables = ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_PLUGINS")
    kept = {name: value for name, value in os.environ.items() if name not in pytest_variables}
    # Compiling PyTorch's modules takes longer than all else.
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    # The tests load the plugin by its name, which fails if pytest has found it as installed.
    kept["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return {**kept, "OOMPH_BINARY": binary(), "PYTHONPATH": python_path(*sites)}


def run(
    command: List[str],
    folder: Path,
    variables: Optional[Dict[str, str]] = None,
    timeout: int = 110,
) -> "subprocess.CompletedProcess[str]":
    """Runs a command with its output caught; standard error is part of it."""
    return subprocess.run(
        command,
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=timeout,
    )


def rehearse(
    program: str, folder: Path, card: str, *sites: str
) -> "subprocess.CompletedProcess[str]":
    """Runs the text of a program on the shadow GPU."""
    (folder / "program.py").write_text(program, encoding="utf-8")
    output = str(folder / "rehearsal")
    command = [
        binary(),
        "rehearse",
        "--card",
        card,
        "--output",
        output,
        "--",
        sys.executable,
        "program.py",
    ]
    return run(command, folder, environment(torch_site(), *sites))
