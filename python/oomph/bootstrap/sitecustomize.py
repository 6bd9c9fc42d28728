"""Loaded by every Python that `python -m oomph record` starts: records, then runs the sitecustomize
that was there before."""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_here = os.path.dirname(os.path.abspath(__file__))
# Programs see the search path that they would have seen. Children find this folder through
# PYTHONPATH.
sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or os.curdir) != _here]


def _record() -> None:
    # The package may be installed for another Python than this one.
    before = list(sys.path)
    sys.path.append(os.path.dirname(os.path.dirname(_here)))
    try:
        from oomph import bootstrap

        bootstrap.start()
    except Exception as error:
        print(f"oomph: this process is not recorded: {error}", file=sys.stderr)
    finally:
        sys.path[:] = before


_record()

_spec = PathFinder.find_spec("sitecustomize", sys.path)
if _spec is not None and _spec.loader is not None:
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["sitecustomize"] = _module
    _spec.loader.exec_module(_module)
