"""What torch.compile did in a rehearsed process. Imported by `_oomph_rehearsal`."""

import os
import sys
from typing import Any, Dict, Optional

# Scripts of Inductor that compile or measure for another process; they start no program of the user.
HELPER_SCRIPTS = ("compile_worker/__main__.py", "__autotune_main__.py")
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def is_helper(torch_folder: str) -> bool:
    """Whether this process is one of Inductor's own: it works for a process that records, and is not a rank."""
    script = os.path.abspath(sys.argv[0]) if getattr(sys, "argv", None) else ""
    inductor = os.path.join(torch_folder, "_inductor")
    return script in [os.path.join(inductor, *name.split("/")) for name in HELPER_SCRIPTS]


def compile_facts() -> Optional[Dict[str, Any]]:
    """Counts of Dynamo and Inductor; None where torch.compile was not used."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters = getattr(dynamo, "counters", {})
    inductor = dict(counters.get("inductor", {}))
    if not inductor:
        return None
    measured = sum(count for name, count in inductor.items() if name.endswith(".benchmark_gpu"))
    return {
        "cache": os.environ.get(CACHE_VARIABLE),
        "graphs_from_cache": int(inductor.get("fxgraph_cache_hit", 0)),
        "graphs_compiled": int(inductor.get("fxgraph_cache_miss", 0) + inductor.get("fxgraph_cache_bypass", 0)),
        "candidates_measured": int(measured),
        "kernels_chosen": kernels_chosen(getattr(dynamo, "compilation_time_metrics", None)),
    }


def kernels_chosen(timings: Optional[Dict[str, Any]]) -> Optional[int]:
    """Kernels of which Inductor measured several candidates: it times each such choice once. None: it keeps no times."""
    if timings is None:
        return None
    choices = ("CachingAutotuner.benchmark_all_configs", "_template_autotuning")
    return sum(len(times) for name, times in dict(timings).items() if name.endswith(choices))
