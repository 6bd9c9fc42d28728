"""Finds the user's own cuDNN, which knows the workspaces of convolutions without a GPU, and gives it to the shadow GPU.

Run as a program, it tries the library: cuDNN ends a process where it lacks another library, so a process that can be lost
tries first.
"""

import ctypes
import os
import sys
from typing import Any, Callable, List, Optional

# Set here, for the processes that this one starts: the path of the library, or a hyphen and the reason against it.
DECISION = "OOMPH_REHEARSE_CUDNN"
LIBRARY = "libcudnn.so.9"
# In the order in which the shadow GPU takes their addresses.
FUNCTIONS = (
    "cudnnBackendCreateDescriptor",
    "cudnnBackendDestroyDescriptor",
    "cudnnBackendSetAttribute",
    "cudnnBackendGetAttribute",
    "cudnnBackendFinalize",
    "cudnnGetVersion",
    "cudnnGetCudartVersion",
    "cudnnGetLastErrorString",
)
TRIAL_SECONDS = 120
SearchCallback = ctypes.CFUNCTYPE(None)


def find_cudnn(torch_folder: str) -> Optional[str]:
    """The library as a package beside torch or elsewhere in Python's path, or where the dynamic linker is told to look."""
    sites = [os.path.dirname(torch_folder)] + [entry for entry in sys.path if entry]
    folders = [os.path.join(site, "nvidia", "cudnn", "lib") for site in sites]
    folders += [entry for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry]
    folders.append(os.path.join(sys.prefix, "lib"))
    files = (os.path.join(folder, LIBRARY) for folder in folders)
    return next((os.path.abspath(file) for file in files if os.path.exists(file)), None)


def use(core: Any, path: str, trial: bool) -> Optional[str]:
    """Gives a library to the shadow GPU; the reason if it cannot be used."""
    try:
        library = ctypes.CDLL(path)
        found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in FUNCTIONS]
    except (OSError, AttributeError) as error:
        return f"cuDNN cannot be loaded: {error}"
    addresses = (ctypes.c_size_t * len(FUNCTIONS))(*[address or 0 for address in found])
    reason = ctypes.create_string_buffer(1024)
    function = core.oomph_shadow_use_cudnn
    function.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint64]
    if function(addresses, int(trial), reason, len(reason)) == 0:
        return None
    return reason.value.decode(errors="replace")


def try_in_child(path: str, files: List[str]) -> Optional[str]:
    """Whether cuDNN answers in a process of its own with the shadow GPU; the reason if not."""
    import subprocess

    command = [sys.executable, "-I", "-S", os.path.abspath(__file__), path] + files
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=TRIAL_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"cuDNN could not be tried: {error}"
    if done.returncode == 0:
        return None
    lines = (done.stdout + done.stderr).decode(errors="replace").split("\n")
    said = next((line.strip() for line in lines if line.strip()), "")
    if done.returncode == 1 and done.stdout:
        return said
    return f"cuDNN ended its process with code {done.returncode}" + (f": {said}" if said else "")


def decide(torch_folder: str, files: List[str]) -> str:
    """The path of a library that works, or a hyphen and the reason. Found out once for all processes of a program."""
    decision = os.environ.get(DECISION)
    if decision:
        return decision
    path = find_cudnn(torch_folder)
    reason = try_in_child(path, files) if path else "cuDNN 9 is not installed"
    decision = path if path and reason is None else f"-{reason}"
    os.environ[DECISION] = decision
    return decision


class InstalledCudnn:
    """The choice of this process, made when the program first runs a convolution."""

    def __init__(self, core: Any, torch_folder: str, files: List[str]) -> None:
        self.core = core
        self.torch_folder = torch_folder
        self.files = files
        self.reason: Optional[str] = None
        self.callback: Callable[[], None] = SearchCallback(self.search)
        core.oomph_shadow_on_convolution(self.callback)

    def search(self) -> None:
        """Called by the shadow GPU before the first convolution."""
        decision = decide(self.torch_folder, self.files)
        self.reason = decision[1:] if decision.startswith("-") else use(self.core, decision, trial=False)


def main() -> int:
    """Tries a library: its path, the core, the stand-ins for other libraries."""
    path, files = sys.argv[1], sys.argv[2:]
    libraries = [ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL) for file in files]
    reason = use(libraries[0], path, trial=True)
    if reason is not None:
        print(reason)
    return 0 if reason is None else 1


if __name__ == "__main__":
    sys.exit(main())
