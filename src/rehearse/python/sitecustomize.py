"""Loaded by every Python that `oomph rehearse` starts: runs the sitecustomize that was there before, then waits for torch."""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_here = os.path.dirname(os.path.abspath(__file__))
_others = [folder for folder in sys.path if os.path.abspath(folder or os.curdir) != _here]

import _oomph_rehearsal  # noqa: E402

# Programs see the search path that they would have seen. Children find this folder through PYTHONPATH.
sys.path[:] = _others
_oomph_rehearsal.install()

_spec = PathFinder.find_spec("sitecustomize", _others)
if _spec is not None and _spec.loader is not None:
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["sitecustomize"] = _module
    _spec.loader.exec_module(_module)
