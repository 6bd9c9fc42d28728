"""The package as a whole: its names, what importing it costs, how it finds the program, and how a
wheel is built."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import shadow

import oomph
from oomph import binary

IMPORT = """
import sys
before = set(sys.modules)
import oomph
oomph.record
print(sorted(set(sys.modules) - before))
"""


def python(*arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "PYTHONPATH": shadow.python_path(), **more}
    return subprocess.run(
        [sys.executable, *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def test_import_is_cheap() -> None:
    modules = python("-c", IMPORT).stdout
    for heavy in ("torch", "numpy", "json", "pickle", "subprocess", "inspect", "oomph.answers"):
        assert f"'{heavy}'" not in modules
    # A module takes about half a millisecond; the limit is 50 ms.
    assert 1 < modules.count("'") // 2 < 60, modules


def test_every_public_name_exists() -> None:
    for name in oomph.__all__:
        assert getattr(oomph, name) is not None
    assert set(oomph.__all__) <= set(dir(oomph))
    with pytest.raises(AttributeError, match="no attribute 'recrod'"):
        oomph.recrod  # type: ignore[attr-defined]


def test_version_is_that_of_the_program() -> None:
    done = subprocess.run([shadow.binary(), "--version"], stdout=subprocess.PIPE, encoding="utf-8")
    assert done.stdout.split()[1] == oomph.__version__


def test_program_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOMPH_BINARY", "/nowhere/oomph")
    with pytest.raises(
        oomph.OomphError, match="OOMPH_BINARY=/nowhere/oomph: there is no such file"
    ):
        binary.find_binary()
    monkeypatch.delenv("OOMPH_BINARY")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(binary, "_candidates", lambda: iter([Path("/nowhere/oomph")]))
    with pytest.raises(oomph.OomphError, match="reinstall it with pip"):
        binary.find_binary()


def test_program_beside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of `pip install --target` and `--prefix`."""
    monkeypatch.delenv("OOMPH_BINARY", raising=False)
    for package in ("target/oomph", "prefix/lib/python3/site-packages/oomph"):
        place = tmp_path / package.split("/")[0] / "bin" / "oomph"
        place.parent.mkdir(parents=True)
        place.write_text("")
        place.chmod(0o755)
        monkeypatch.setattr(binary, "_PACKAGE", tmp_path / package)
        assert place in list(binary._candidates())


def test_commands_are_passed_on() -> None:
    program = shadow.binary()
    done = python("-m", "oomph", "advise", "missing.pickle", OOMPH_BINARY=program)
    assert (done.returncode, done.stderr) == (2, "error: missing.pickle: no such file\n")
    done = python("-m", "oomph", "list", OOMPH_BINARY="/nowhere/oomph")
    assert done.returncode == 2 and done.stderr.startswith("error: OOMPH_BINARY=/nowhere/oomph")


# ---- the build

FAKE_CARGO = """#!{python}
import json, sys
assert sys.argv[1] == "build" and "--release" in sys.argv and "oomph-torch-allocator" in sys.argv
target = {{"name": "oomph", "kind": ["cdylib"]}}
print(json.dumps({{"reason": "compiler-artifact", "target": {{"name": "libc", "kind": ["lib"]}}, "filenames": ["libc.rlib"]}}))
print(json.dumps({{"reason": "compiler-artifact", "target": target, "filenames": {files}}}))
print(json.dumps({{"reason": "build-finished", "success": True}}))
"""


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The build backend, with a stand-in for maturin that lists the package when it is called."""
    maturin = types.ModuleType("maturin")
    hooks = (
        "prepare_metadata_for_build_wheel",
        "prepare_metadata_for_build_editable",
        "build_sdist",
    )
    needs = (
        "get_requires_for_build_sdist",
        "get_requires_for_build_wheel",
        "get_requires_for_build_editable",
    )
    for name in (*hooks, *needs):
        setattr(maturin, name, name)
    package = tmp_path / "package"
    package.mkdir()
    for name in ("build_wheel", "build_editable"):
        setattr(maturin, name, lambda *arguments: ",".join(sorted(os.listdir(package))))
    monkeypatch.setitem(sys.modules, "maturin", maturin)
    spec = importlib.util.spec_from_file_location(
        "backend", shadow.PACKAGE / "build" / "backend.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.LIBRARY = package / "liboomph.so"  # type: ignore[attr-defined]
    return module


def cargo(folder: Path, monkeypatch: pytest.MonkeyPatch, *files: str) -> None:
    script = folder / "cargo"
    script.write_text(FAKE_CARGO.format(python=sys.executable, files=json.dumps(files)))
    script.chmod(0o755)
    monkeypatch.setenv("CARGO", str(script))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="liboomph.so is for Linux")
def test_wheel_has_the_library(
    backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = tmp_path / "liboomph.so"
    built.write_bytes(b"library")
    cargo(tmp_path, monkeypatch, str(tmp_path / "liboomph.d"), str(built))
    # It is there when maturin packs the wheel, and nothing else is left.
    assert backend.build_wheel("wheels") == "liboomph.so"
    assert backend.LIBRARY.read_bytes() == b"library"
    assert backend.build_editable("wheels") == "liboomph.so"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="liboomph.so is for Linux")
def test_build_without_library_fails(
    backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cargo(tmp_path, monkeypatch, str(tmp_path / "other.so"))
    with pytest.raises(RuntimeError, match="made no liboomph.so"):
        backend.build_wheel("wheels")
