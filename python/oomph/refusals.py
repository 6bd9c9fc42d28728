"""What PyTorch cannot do once its allocator is replaced: errors that say so, and what to do.

PyTorch itself fails inside of its C++ code there, with a message that names neither the cause nor a remedy.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any, Callable, NoReturn, Optional

_TREES = (
    "torch.compile keeps CUDA graphs in trees, whose memory only PyTorch's own allocator can restore. "
    "Call oomph.use_allocator(cudagraph_trees=False), or set "
    "torch._inductor.config.triton.cudagraph_trees = False before the first compilation: "
    "graphs are then captured one by one, which works"
)
_MEM_POOL = (
    "torch.cuda.MemPool needs PyTorch's own allocator, which oomph.use_allocator() has replaced. "
    "CUDA graphs can share memory without it: pass torch.cuda.graph_pool_handle() as their pool. "
    "Otherwise keep PyTorch's allocator, and let the pool alone get its memory from oomph: "
    'torch.cuda.MemPool(torch.cuda.memory.CUDAPluggableAllocator({library!r}, "oomph_alloc", '
    '"oomph_free").allocator()). PyTorch then divides what it gets, so that this cannot save '
    "what is lost inside of its segments"
)
_SHARING = (
    "CUDA tensors cannot be sent to other processes under oomph.use_allocator(): PyTorch exports "
    "memory of its own allocator only. Send tensor.cpu(), or make the tensor in the process that "
    "needs it. Processes that share CUDA tensors must keep PyTorch's allocator"
)


def install(torch: Any, library: str, graphs: Optional[str], cudagraph_trees: bool) -> None:
    """Puts the errors in place.

    library: the path of liboomph.so. graphs: why CUDA graphs cannot be captured, if they cannot.
    cudagraph_trees: whether torch.compile shall ask for trees, which is an error then.
    """
    if graphs is not None:
        torch.cuda.CUDAGraph.capture_begin = _refuse(graphs)
    if cudagraph_trees:
        _after_import("torch._inductor.cudagraph_trees", _refuse_trees)
    else:
        _after_import("torch._inductor.config", _switch_trees_off)
    if hasattr(torch.cuda, "MemPool"):
        torch.cuda.MemPool.__init__ = _refuse(_MEM_POOL.format(library=library))
    for name in ("_share_cuda_", "_new_shared_cuda"):
        if hasattr(torch.UntypedStorage, name):
            setattr(torch.UntypedStorage, name, _refuse(_SHARING))


def _refuse(message: str) -> Callable[..., NoReturn]:
    def refuse(*_arguments: object, **_options: object) -> NoReturn:
        raise RuntimeError(message)

    return refuse


def _refuse_trees(module: Any) -> None:
    for name in ("cudagraphify", "cudagraphify_impl"):
        setattr(module, name, _refuse(_TREES))


def _switch_trees_off(module: Any) -> None:
    module.triton.cudagraph_trees = False


def _after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Calls `action` with a module once it is imported. The compiler takes seconds to import, and few programs need it."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))


class _AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.action = action

    def find_spec(
        self, name: str, path: Optional[Any], _target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if name != self.name:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        if found is None or found.loader is None:
            return None
        sys.meta_path.remove(self)
        loader: Any = found.loader
        execute = loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            self.action(module)

        loader.exec_module = execute_and_act
        return found
