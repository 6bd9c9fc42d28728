"""Loaded in a rehearsed rank of a world with several: exchanges that PyTorch makes on the host.

Two kinds of worlds. In a complete one every rank is a process of the rehearsal: `oomph rehearse --ranks N`, or a launcher
such as torchrun. In one with absent ranks (`--rank R`) nothing may wait for them; this rank's data stands for theirs.
"""

import ctypes
import importlib
import itertools
import os
import pickle
import sys
from datetime import timedelta
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

# Set by `oomph rehearse --ranks`: "complete" or "absent".
WORLD = "OOMPH_REHEARSE_WORLD"
EXCHANGE = "OOMPH_SHADOW_EXCHANGE"
# An id of NCCL that an absent rank would have made.
UNIQUE_ID = b"\x07" * 128

World = Tuple[Any, int, int]


def attach(core: Any) -> None:
    """Changes torch.distributed in this process. A torch without it stays as it is."""
    try:
        import torch.distributed as distributed
    except ImportError:
        return
    if not distributed.is_available():
        return
    distributed_c10d = importlib.import_module("torch.distributed.distributed_c10d")
    # torch.distributed has a function of the same name.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    world = os.environ.get(WORLD)
    if world == "absent":
        absent = lenient_store_class(distributed)
        replace_rendezvous(rendezvous, ("env", "tcp", "file"), lambda: absent())
        distributed.TCPStore = lambda *_, **__: absent()
        replace_gloo(distributed_c10d)
        tell_group_sizes(distributed_c10d, core)
    elif world == "complete":
        size = int(os.environ["WORLD_SIZE"])
        path = os.path.join(os.environ[EXCHANGE], "store")
        # A group that is made again must not find the keys of the first one.
        calls = itertools.count(1)
        # A TCPStore would end with the rank that serves it; torchrun serves it itself.
        replace_rendezvous(rendezvous, ("env",), lambda: distributed.FileStore(f"{path}-{next(calls)}", size))
    ObjectExchange(distributed_c10d, world == "absent").attach()


def replace(owner: Any, name: str, new: Any) -> None:
    """In all modules of torch.distributed that imported it."""
    original = getattr(owner, name, None)
    modules = [module for key, module in sys.modules.items() if key.startswith("torch.distributed")]
    for module in modules if original is not None else ():
        if getattr(module, name, None) is original:
            setattr(module, name, new)


# ---- the store


def lenient_store_class(distributed: Any) -> Any:
    """A store in which every key is there: absent ranks would have written it."""

    class LenientStore(distributed.Store):  # type: ignore[misc]
        # PyTorch keeps the C++ half alone alive.
        alive: List[Any] = []

        def __init__(self) -> None:
            super().__init__()
            self.values: Dict[str, bytes] = {}
            self.alive.append(self)

        def set(self, key: str, value: Any) -> None:
            self.values[key] = value.encode() if isinstance(value, str) else bytes(value)

        def get(self, key: str) -> bytes:
            return self.values.get(key, UNIQUE_ID)

        def add(self, key: str, value: int) -> int:
            total = int(self.values.get(key, b"0")) + value
            self.values[key] = str(total).encode()
            return total

        def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
            self.set(key, desired)
            return self.values[key]

        def check(self, keys: List[str]) -> bool:
            return all(key in self.values for key in keys)

        def wait(self, keys: List[str], timeout: Optional[timedelta] = None) -> None:
            return None

        def delete_key(self, key: str) -> bool:
            return self.values.pop(key, None) is not None

        def num_keys(self) -> int:
            return len(self.values)

        def clone(self) -> "LenientStore":
            return self

    return LenientStore


def replace_rendezvous(rendezvous: Any, schemes: Tuple[str, ...], make: Callable[[], Any]) -> None:
    """`init_process_group` gets this store. Rank and size are those of the URL or of the launcher."""

    def handler(url: str, *_: Any, **__: Any) -> Iterator[World]:
        from urllib.parse import parse_qsl, urlparse

        query = dict(parse_qsl(urlparse(url).query))
        rank = int(query.get("rank", os.environ["RANK"]))
        size = int(query.get("world_size", os.environ["WORLD_SIZE"]))
        yield make(), rank, size

    for scheme in schemes:
        rendezvous._rendezvous_handlers[scheme] = handler


# ---- groups


def tell_group_sizes(c10d: Any, core: Any) -> None:
    """NCCL splits a group without being told the size of the new one; PyTorch knows it."""
    try:
        tell = core.oomph_shadow_group_size
    except AttributeError:
        return
    tell.argtypes, tell.restype = [ctypes.c_int, ctypes.c_int], None
    color_of = getattr(c10d, "_process_group_color", None)
    split = getattr(c10d.ProcessGroup, "split_group", None)

    def told_color(ranks: List[int]) -> int:
        color = int(color_of(ranks))  # type: ignore[misc]
        tell(color, len(ranks))
        return color

    def told_split(parent: Any, ranks: List[int], *args: Any, **kwargs: Any) -> Any:
        if parent.rank() in ranks:
            tell(-1, len(ranks))
        return split(parent, ranks, *args, **kwargs)  # type: ignore[misc]

    if color_of is not None:
        c10d._process_group_color = told_color
    if split is not None:
        c10d.ProcessGroup.split_group = told_split


def replace_gloo(c10d: Any) -> None:
    """Gloo connects to every rank. PyTorch's own group without a network stands in for it; what that group leaves
    undone (`served_on_host`) is done here."""
    fake = getattr(sys.modules["torch._C._distributed_c10d"], "FakeProcessGroup", None)
    if fake is None or not hasattr(c10d, "ProcessGroupGloo"):
        return
    create = getattr(fake, "_create_internal", fake)
    # Its base class refuses it. The number only serves error messages.
    fake._set_sequence_number_for_group = lambda group: None

    class GlooType(type):
        def __call__(cls, store: Any, rank: int, size: int, *_: Any, **__: Any) -> Any:
            return create(rank, size)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, fake)

    replace(c10d, "ProcessGroupGloo", GlooType("ProcessGroupGloo", (), {}))
    replace(c10d, "monitored_barrier", lambda *_, **__: None)
    for name, action in HOST_OPERATIONS.items():
        original = getattr(c10d.ProcessGroup, name, None)
        if original is not None:
            setattr(c10d.ProcessGroup, name, served_on_host(name, original, action))


def served_on_host(name: str, original: Callable[..., Any], action: Callable[..., bool]) -> Callable[..., Any]:
    """A method of ProcessGroup that also moves the data of tensors in host memory."""

    def method(group: Any, *args: Any, **kwargs: Any) -> Any:
        work = original(group, *args, **kwargs)
        with sys.modules["torch"].no_grad():
            served = not is_on_host(args[0]) or action(group, *args)
        if not served:
            raise NotImplementedError(
                f"{name} of a tensor in host memory from an absent rank cannot be rehearsed: its data is not known; "
                "rehearse all ranks (--ranks N without --rank)"
            )
        return work

    return method


def is_on_host(tensors: Any) -> bool:
    """Whether the first tensor of a list, or of a list of lists, is in host memory."""
    while isinstance(tensors, (list, tuple)):
        if not tensors:
            return False
        tensors = tensors[0]
    return tensors.device.type == "cpu"


def reduce_as_if_equal(group: Any, tensors: Any, options: Any = None, *_: Any) -> bool:
    """Every rank has the same tensor: sums and products grow with the ranks, all else stays."""
    operation = getattr(options, "reduceOp", None)
    kinds = sys.modules["torch.distributed"].ReduceOp
    for tensor in tensors if isinstance(tensors, list) else [tensors]:
        if operation == kinds.SUM:
            tensor.mul_(group.size())
        elif operation == kinds.PRODUCT:
            tensor.pow_(group.size())
    return True


def gather_as_if_equal(group: Any, outputs: Any, inputs: Any, *_: Any) -> bool:
    for own, others in zip(inputs, outputs):
        for other in others:
            other.copy_(own)
    return True


def scatter_to_own(group: Any, outputs: Any, inputs: Any, *_: Any) -> bool:
    if not inputs:
        return False
    outputs[0].copy_(inputs[0][group.rank()])
    return True


def reduce_scatter_as_if_equal(group: Any, outputs: Any, inputs: Any, options: Any = None, *_: Any) -> bool:
    outputs[0].copy_(inputs[0][group.rank()])
    return reduce_as_if_equal(group, outputs, options)


def all_to_all_as_if_equal(group: Any, outputs: Any, inputs: Any, *_: Any) -> bool:
    own = inputs[group.rank()]
    if any(output.numel() != own.numel() for output in outputs):
        return False
    for output in outputs:
        output.copy_(own.view_as(output))
    return True


def all_to_all_base_as_if_equal(group: Any, output: Any, given: Any, out_splits: Any, in_splits: Any, *_: Any) -> bool:
    size = group.size()
    parts = given.split(list(in_splits)) if in_splits else given.chunk(size)
    places = output.split(list(out_splits)) if out_splits else output.chunk(size)
    return all_to_all_as_if_equal(group, list(places), list(parts))


# What PyTorch's group without a network does not do by itself, by the method's name.
HOST_OPERATIONS: Dict[str, Callable[..., bool]] = {
    "allreduce": reduce_as_if_equal,
    "reduce": reduce_as_if_equal,
    "gather": gather_as_if_equal,
    "scatter": scatter_to_own,
    "reduce_scatter": reduce_scatter_as_if_equal,
    "alltoall": all_to_all_as_if_equal,
    "alltoall_base": all_to_all_base_as_if_equal,
    "recv": lambda *_: False,
    "recv_anysource": lambda *_: False,
}


# ---- objects


class ObjectExchange:
    """Python objects travel through the store: on the GPU their sizes would be computed by kernels, and nothing computes."""

    def __init__(self, c10d: Any, absent: bool) -> None:
        self.c10d = c10d
        self.absent = absent
        self.calls: Dict[str, int] = {}

    def attach(self) -> None:
        functions = {
            "all_gather_object": self.all_gather_object,
            "gather_object": self.gather_object,
            "broadcast_object_list": self.broadcast_object_list,
            "scatter_object_list": self.scatter_object_list,
        }
        for name, function in functions.items():
            replace(self.c10d, name, function)

    def key(self, group: Any) -> str:
        """Another one for each call on a group; all of its ranks call in the same order."""
        name = str(group.group_name)
        self.calls[name] = self.calls.get(name, 0) + 1
        return f"oomph/{name}/{self.calls[name]}"

    def members(self, group: Any) -> Any:
        """The group, or None where this rank is not in it."""
        group = group or self.c10d._get_default_group()
        return None if group is self.c10d.GroupMember.NON_GROUP_MEMBER else group

    def root(self, group: Any, root: Optional[int], group_root: Optional[int]) -> int:
        """The root's rank in the group."""
        if group_root is not None:
            return group_root
        return int(self.c10d.get_group_rank(group, root or 0))

    def put(self, key: str, rank: int, value: Any) -> None:
        self.c10d._get_default_store().set(f"{key}/{rank}", pickle.dumps(value))

    def take(self, key: str, rank: int) -> Any:
        return pickle.loads(self.take_bytes(key, rank))

    def take_bytes(self, key: str, rank: int) -> bytes:
        return bytes(self.c10d._get_default_store().get(f"{key}/{rank}"))

    def allocate(self, group: Any, sizes: List[int]) -> None:
        """Allocates and releases the tensors with which PyTorch exchanges objects on a GPU, in bytes."""
        device_of = getattr(self.c10d, "_get_object_coll_device", None) or self.c10d._get_pg_default_device
        device = device_of(group)
        if str(getattr(device, "type", device)) != "cuda":
            return
        torch = sys.modules["torch"]
        tensors = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
        del tensors

    def gathered(self, texts: List[bytes], group: Any, gets: bool) -> List[Any]:
        """Objects from their pickles, with the tensors of a gather: the own size and object, then those of all ranks, which
        NCCL gathers into one tensor more."""
        count, longest = group.size(), max(len(text) for text in texts)
        own = [8, longest, 8 * count]
        self.allocate(group, own + [8 * count] + ([count * longest] * 2 if gets else []))
        return [pickle.loads(text) for text in texts]

    def all_gather_object(self, object_list: List[Any], obj: Any, group: Any = None) -> None:
        group = self.members(group)
        if group is None:
            return
        count = group.size()
        if self.absent:
            object_list[:count] = self.gathered([pickle.dumps(obj)] * count, group, True)
            return
        key = self.key(group)
        self.put(key, group.rank(), obj)
        texts = [self.take_bytes(key, rank) for rank in range(count)]
        object_list[:count] = self.gathered(texts, group, True)

    def gather_object(
        self,
        obj: Any,
        object_gather_list: Optional[List[Any]] = None,
        dst: Optional[int] = None,
        group: Any = None,
        group_dst: Optional[int] = None,
    ) -> None:
        group = self.members(group)
        if group is None:
            return
        gets = group.rank() == self.root(group, dst, group_dst) and object_gather_list is not None
        if self.absent:
            texts = [pickle.dumps(obj)] * group.size()
        else:
            key = self.key(group)
            self.put(key, group.rank(), obj)
            texts = [self.take_bytes(key, rank) for rank in range(group.size())]
        objects = self.gathered(texts, group, gets)
        if gets and object_gather_list is not None:
            object_gather_list[: group.size()] = objects

    def broadcast_object_list(
        self,
        object_list: List[Any],
        src: Optional[int] = None,
        group: Any = None,
        device: Any = None,
        group_src: Optional[int] = None,
    ) -> None:
        group = self.members(group)
        if group is None:
            return
        # The objects of an absent rank are not known: this rank keeps its own.
        if not self.absent:
            key, root = self.key(group), self.root(group, src, group_src)
            if group.rank() == root:
                self.put(key, root, object_list)
            else:
                object_list[:] = self.take(key, root)
        total = sum(len(pickle.dumps(one)) for one in object_list)
        self.allocate(group, [8 * len(object_list), max(total, 1)])

    def scatter_object_list(
        self,
        scatter_object_output_list: List[Any],
        scatter_object_input_list: Optional[List[Any]] = None,
        src: Optional[int] = None,
        group: Any = None,
        group_src: Optional[int] = None,
    ) -> None:
        group = self.members(group)
        if group is None:
            return
        root = self.root(group, src, group_src)
        given = scatter_object_input_list
        if self.absent:
            if group.rank() == root and given is not None:
                scatter_object_output_list[0] = given[group.rank()]
            return
        key = self.key(group)
        if group.rank() == root:
            self.put(key, root, given)
        scatter_object_output_list[0] = self.take(key, root)[group.rank()]
