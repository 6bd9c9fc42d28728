"""Random programs of allocator calls, in the oracle's language (README.md)."""

import random
import re
import sys

MIB = 1 << 20
GIB = 1 << 30


class Program:
    """A random program in the oracle's language."""

    def __init__(self, minor, kind, number):
        self.random = random.Random(f"{kind} {number}")
        self.minor = minor
        self.lines = []
        self.live = []  # (id, stream, pool)
        self.next_id = 0
        self.number = number
        self.with_pools = kind.startswith("pools")
        if self.with_pools and minor < 3:
            sys.exit(f"2.{minor} has no private pools that a program can use")
        self.down = kind.endswith("desc")
        roll = self.random
        self.total = roll.choice([80 * GIB, 80 * GIB, 24 * GIB, roll.randint(2, 8) * GIB])
        self.streams = [0] + roll.sample([8, 16, 24], roll.choice([0, 0, 1, 2]))
        self.users = self.streams[1:] if roll.random() < 0.6 else []
        self.largest = roll.choice([8, 40, 100, 200]) * MIB
        # Often less memory than the program would like.
        tight = roll.randint(3, 20) * (2 if self.with_pools else 1) * max(self.largest, 20 * MIB)
        self.capacity = roll.choice([self.total, self.total, min(tight // MIB * MIB, self.total)])
        self.small = roll.choice([0.05, 0.3, 0.7])
        self.frees = roll.choice([0.4, 0.47, 0.5])
        self.reuse = roll.random() < 0.4
        self.settings = self.random_settings() if roll.random() < 0.6 else ""
        self.changes = kind.startswith("changes")
        if kind.startswith("newer"):
            self.settings = ",".join(self.newer_settings() + ([self.settings] if self.settings else []))
        self.fraction = None
        if roll.random() < 0.3:
            self.fraction = min(1, round(tight / self.total, roll.choice([2, 3, 6])) or 0.01)
        # The recording begins in the middle, or a ring of that many entries kept only the last ones.
        self.middle = roll.random() < 0.15
        self.ring = roll.choice([100, 200, 300]) if not self.middle and roll.random() < 0.07 else None
        self.pools = Pools(self)
        self.build(roll.randint(100, 500) if self.with_pools else roll.randint(150, 700))

    def random_settings(self):
        roll = self.random
        parts = []
        if roll.random() < 0.1 and self.minor >= 11:
            parts.append(f"large_segment_size_mb:{roll.choice([12, 16, 24, 40])}")
        if roll.random() < 0.35:
            parts.append(f"max_split_size_mb:{roll.choice([40, 50, 64, 100])}")
            if roll.random() < 0.2 and self.minor >= 6:
                parts.append(f"max_non_split_rounding_mb:{roll.choice([40, 50, 100])}")
        if roll.random() < 0.3:
            parts.append(f"garbage_collection_threshold:{roll.choice(['0.2', '0.5', '0.8', '0.95'])}")
        if roll.random() < 0.25:
            choice = roll.choice(["1", "2", "4", "8", "[1:2,4:4,>:8]", "[64:8,256:4,1024:4,>:1]"])
            parts.append(f"roundup_power2_divisions:{choice}")
        if roll.random() < 0.45 and self.minor >= 1:
            parts.append("expandable_segments:True")
        roll.shuffle(parts)
        return ",".join(parts)

    def newer_settings(self):
        """Settings that 2.10 and later releases have."""
        roll = self.random
        if self.minor < 10:
            sys.exit(f"2.{self.minor} has no newer settings")
        parts = []
        if roll.random() < 0.5 or self.minor < 12:
            share = roll.randint(3, 30) * max(self.largest, 20 * MIB) / self.total
            parts.append(f"per_process_memory_fraction:{min(1.0, round(share, 4) or 0.01)}")
        if self.minor >= 12 and (roll.random() < 0.5 or not parts):
            parts.append("throw_on_cudamalloc_oom:True")
        if self.minor >= 15 and roll.random() < 0.4:
            parts.append(f"expandable_segments_reserve:{roll.choice(['0.5', '0.05', '1G', '2G'])}")
        return parts

    def change_settings(self):
        """New settings on the way. The split limit stays where memory is short: PyTorch then frees memory in use."""
        lasting = ["expandable_segments"]
        if "expandable_segments:True" in self.settings or self.capacity < self.total or self.fraction is not None:
            lasting.append("max_split_size_mb")
        parts_of = lambda text: [part for part in re.split(r",(?![^[]*\])", text) if part]
        lasts = lambda part: part.split(":")[0] in lasting
        parts = [part for part in parts_of(self.random_settings()) if not lasts(part)]
        self.lines.append("conf " + ",".join(parts + [part for part in parts_of(self.settings) if lasts(part)]))

    def build(self, length):
        roll = self.random
        trains = roll.random() < 0.4
        half = length // 2
        while len(self.lines) < length:
            if self.middle and len(self.lines) >= half and "history" not in self.lines:
                self.lines.append("history")
            late = len(self.lines) > 0.7 * length and not any(line.startswith("conf") for line in self.lines)
            if self.changes and (late or roll.random() < 2 / length):
                self.change_settings()
            if trains and not self.pools.busy() and roll.random() < 0.1:
                self.training_step()
            else:
                self.step()
        if self.with_pools:
            self.pools.finish()

    def step(self):
        roll = self.random.random()
        if roll < 0.012 and (self.minor >= 8 or not self.pools.scopes):
            self.lines.append("e")
        elif roll < 0.05 and self.users:
            self.lines.append(f"{self.random.choice(['busy', 'idle'])} {self.random.choice(self.users)}")
        elif roll < 0.11 and self.users and self.live and not self.pools.scopes:
            block = self.random.choice(self.live)
            self.lines.append(f"rs {block[0]} {self.random.choice(self.users)}")
        elif roll < 0.14 and self.with_pools:
            self.pools.step()
        elif self.random.random() < self.frees and self.live:
            self.free(self.random.choice([0, -1, self.random.randrange(len(self.live))]))
        else:
            self.allocate(self.size())

    def training_step(self):
        """Activations that live until their reverse pass, and temporaries."""
        first = len(self.live)
        sizes = [self.size() for _ in range(self.random.randint(2, 8))]
        for size in sizes:
            self.allocate(size, 0)
            if self.random.random() < 0.5:
                self.allocate(self.size(), 0)
                self.free(-1)
        for size in reversed(sizes):
            self.allocate(size, 0)
            self.free(-2)
            if self.random.random() < 0.8:
                self.free(-1)
        while len(self.live) > first and self.random.random() < 0.9:
            self.free(-1)

    def allocate(self, size, stream=None):
        if stream is None:
            stream = self.pools.stream() if self.pools.capture else self.random.choice(self.streams)
        self.lines.append(f"m {self.next_id} {size} {stream}")
        self.live.append((self.next_id, stream))
        self.next_id += 1

    def free(self, place):
        if -len(self.live) <= place < len(self.live):
            self.lines.append(f"f {self.live.pop(place)[0]}")

    def size(self):
        roll = self.random
        if roll.random() < self.small:
            return roll.choice([
                roll.randint(1, 2048), roll.randint(1, 64) * 512, roll.randint(1, MIB),
                roll.choice([1, 511, 512, 513, MIB - 512, MIB - 1, MIB]),
            ])
        size = roll.choice([
            roll.randint(MIB + 1, 10 * MIB), roll.randint(MIB + 1, 10 * MIB),
            roll.choice([MIB + 1, 10 * MIB - 512, 10 * MIB - 1, 10 * MIB, 20 * MIB, 20 * MIB + 512]),
            roll.randint(1, self.largest // MIB) * MIB,
            roll.randint(1, self.largest // MIB) * MIB + roll.randint(0, 4) * 512,
            roll.choice([40, 41, 50, 60, 64, 80]) * MIB,
            roll.randint(MIB, self.largest),
        ])
        return min(size, self.total // 4)

    def text(self):
        lines = [f"device {self.total} {self.capacity} {'down' if self.down else 'up'}"]
        if self.reuse:
            lines.append("reuse")
        if self.settings:
            lines.append(f"environment {self.settings}")
        if self.fraction is not None:
            lines.append(f"frac {self.fraction}")
        return lines + self.lines


class Pools:
    """Private pools, with the calls that torch.cuda.MemPool, use_mem_pool and torch.cuda.graph make."""

    def __init__(self, program):
        self.program = program
        self.scopes = []  # Open ones, the latest last.
        self.capture = None
        self.memory_pools = []
        self.graphs = []  # Pools of live graphs, one entry for each graph.
        self.next_memory_pool = 1
        self.next_capture = 1

    def busy(self):
        return bool(self.scopes)

    def say(self, line):
        self.program.lines.append(line)

    def stream(self):
        return self.capture[1]

    def step(self):
        roll = self.program.random
        choice = roll.random()
        if self.capture:
            if choice < 0.4:
                self.end_scope()
        elif self.scopes and choice < 0.4:
            self.end_scope()
        elif choice < 0.45:
            self.begin_memory_pool()
        elif choice < 0.65:
            self.begin_capture()
        elif not self.scopes:
            self.delete_something()

    def begin_memory_pool(self):
        roll = self.program.random
        open_ones = [scope[0] for scope in self.scopes]
        idle = [pool for pool in self.memory_pools if pool not in open_ones]
        if not idle or roll.random() < 0.5:
            pool = str(self.next_memory_pool)
            self.next_memory_pool += 1
            self.memory_pools.append(pool)
            if self.program.minor >= 6:
                self.say(f"cp {pool} 0")
        else:
            pool = roll.choice(idle)
        self.say(f"bp {pool} all")
        self.scopes.append((pool, None))

    def begin_capture(self):
        program = self.program
        if program.random.random() < 0.35 and self.graphs:
            pool = program.random.choice(self.graphs)
        else:
            pool = f"g{self.next_capture}"
            self.next_capture += 1
        if pool in [scope[0] for scope in self.scopes]:
            return
        # torch.cuda.graph empties the cache first; torch.cuda.CUDAGraph by itself does not.
        if program.random.random() < 0.7 and (program.minor >= 8 or not self.scopes):
            self.say("e")
        stream = program.random.choice([8, 16, 0])
        self.say(f"bp {pool} {stream}")
        if program.minor >= 13:
            self.say("cb")
        self.capture = (pool, stream)
        self.graphs.append(pool)
        self.scopes.append(self.capture)

    def end_scope(self):
        pool, stream = self.scopes.pop()
        if stream is None:
            self.say(f"ep {pool}")
            if self.program.minor >= 6:
                self.say(f"rp {pool}")
        else:
            if self.program.minor >= 13:
                self.say("ce")
            self.say(f"ep {pool}")
            self.capture = None

    def delete_something(self):
        roll = self.program.random
        if self.memory_pools and roll.random() < 0.5:
            pool = self.memory_pools.pop(roll.randrange(len(self.memory_pools)))
            self.say(f"rp {pool}")
            if self.program.minor >= 8:
                self.say(f"e {pool}")
        elif self.graphs:
            self.say(f"rp {self.graphs.pop(roll.randrange(len(self.graphs)))}")

    def finish(self):
        while self.scopes and self.program.random.random() < 0.9:
            self.end_scope()
        if not self.scopes and self.program.random.random() < 0.3:
            while self.memory_pools or self.graphs:
                self.delete_something()
            self.say("e")
            for _ in range(self.program.random.randint(0, 40)):
                self.program.step()
