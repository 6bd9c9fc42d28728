"""Builds the Python package: liboomph.so by Cargo, everything else by maturin.

A wheel has the program `oomph`, the package, and beside its modules the allocator library for
PyTorch. maturin builds one crate, and the library is another one, so this backend builds it first
and then calls maturin's hooks (PEP 517, PEP 660).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

import maturin

ROOT = Path(__file__).resolve().parents[2]
CRATE = "oomph-torch-allocator"
LIBRARY = ROOT / "python" / "oomph" / "liboomph.so"

Settings = Optional[Dict[str, Any]]


def build_library() -> None:
    """Puts liboomph.so into the package. PyTorch's pluggable allocators exist on Linux only."""
    if not sys.platform.startswith("linux"):
        return
    target = os.environ.get("OOMPH_WHEEL_TARGET")
    command = [
        os.environ.get("CARGO", "cargo"),
        # zig links for an older C library than that of this machine.
        *(["zigbuild", "--target", target] if target else ["build"]),
        "--release",
        "--locked",
        "--package",
        CRATE,
        # Says where the file is: CARGO_TARGET_DIR and CARGO_BUILD_TARGET change that.
        "--message-format=json-render-diagnostics",
    ]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    files = [file for line in built.stdout.splitlines() for file in libraries_of(json.loads(line))]
    if not files:
        raise RuntimeError(f"cargo build --package {CRATE} made no liboomph.so")
    # The release profile has stripped it. A copy under a new name is renamed: a program may have
    # loaded the old file.
    unfinished = LIBRARY.with_suffix(".so.tmp")
    shutil.copyfile(files[-1], unfinished)
    os.replace(unfinished, LIBRARY)


def libraries_of(message: Dict[str, Any]) -> List[str]:
    """The shared libraries that a message of Cargo announces, if it is about this crate."""
    if message.get("reason") != "compiler-artifact" or "cdylib" not in message["target"]["kind"]:
        return []
    return [file for file in message["filenames"] if os.path.basename(file) == LIBRARY.name]


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: Optional[str] = None
) -> str:
    build_library()
    return str(maturin.build_wheel(wheel_directory, config_settings, metadata_directory))


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: Optional[str] = None
) -> str:
    build_library()
    return str(maturin.build_editable(wheel_directory, config_settings, metadata_directory))


build_sdist = maturin.build_sdist
prepare_metadata_for_build_wheel = maturin.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = maturin.prepare_metadata_for_build_editable
get_requires_for_build_sdist = maturin.get_requires_for_build_sdist
get_requires_for_build_wheel = maturin.get_requires_for_build_wheel
get_requires_for_build_editable = maturin.get_requires_for_build_editable
