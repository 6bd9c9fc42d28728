"""A server of the reference GPT: it profiles a pass, takes one tensor of cache per layer, captures graphs and answers."""

import argparse
import gc

import torch
from torch import nn

SIZES = ("layers", "width", "heads", "vocab", "batch", "batched_tokens", "page_tokens", "pages", "requests")
parser = argparse.ArgumentParser()
for size in (*SIZES, "prompt", "output"):
    parser.add_argument(f"--{size}", type=int, required=True)
parser.add_argument("--precision", choices=["bf16", "fp32"], required=True)
parser.add_argument("--graphs", default="")
options = parser.parse_args()
graph_sizes = sorted(map(int, filter(None, options.graphs.split(","))))
context = options.prompt + options.output
dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.precision]


def attend(qkv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Stands in for a kernel that reads pages: keys and values go into the cache, the result is one tensor."""
    query, key, value = qkv.split(options.width, 1)
    rows = cache.view(2, -1, options.width)
    rows[0].index_copy_(0, slots, key)
    rows[1].index_copy_(0, slots, value)
    return torch.empty(query.shape, dtype=query.dtype, device=query.device).copy_(query)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(options.width)
        self.qkv = nn.Linear(options.width, 3 * options.width)
        self.out = nn.Linear(options.width, options.width)
        self.norm2 = nn.LayerNorm(options.width)
        self.up = nn.Linear(options.width, 4 * options.width)
        self.down = nn.Linear(4 * options.width, options.width)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor, cache: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.attention(self.qkv(self.norm1(x)), cache, slots))
        return x + self.down(self.act(self.up(self.norm2(x))))

    def attention(self, qkv: torch.Tensor, cache: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
        if cache is None:  # The pass that is profiled comes before the cache.
            return torch.empty(len(qkv), options.width, dtype=qkv.dtype, device=qkv.device)
        return attend(qkv, cache, slots)


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(options.vocab, options.width)
        self.positions = nn.Embedding(context, options.width)
        self.blocks = nn.ModuleList([Block() for _ in range(options.layers)])
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, options.vocab, bias=False)

    def forward(self, ids: torch.Tensor, places: torch.Tensor, caches: list, slots: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(places)
        for block, cache in zip(self.blocks, caches):
            x = block(x, cache, slots)
        return self.norm(x)


class Sequence:
    def __init__(self) -> None:
        self.computed, self.known, self.pages = 0, options.prompt, 0


class Server:
    def __init__(self) -> None:
        tokens, most = options.batched_tokens, options.batch
        longest = -(-context // options.page_tokens)
        self.ids = torch.zeros(tokens, dtype=torch.int32, device="cuda")
        self.places = torch.zeros(tokens, dtype=torch.int64, device="cuda")
        self.slots = torch.zeros(tokens, dtype=torch.int64, device="cuda")
        self.starts = torch.zeros(most + 1, dtype=torch.int32, device="cuda")
        self.lengths = torch.zeros(most, dtype=torch.int32, device="cuda")
        self.table = torch.zeros(most, longest, dtype=torch.int32, device="cuda")
        self.model = Gpt().to(dtype).to("cuda").eval()
        self.caches: list = [None] * options.layers
        self.graphs: dict = {}
        # The first page is not given to sequences.
        self.free = options.pages - 1
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def start(self) -> None:
        torch.cuda.empty_cache()
        self.sample(self.run(options.batched_tokens), options.batch)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        shape = (2, options.pages, options.page_tokens, options.heads, options.width // options.heads)
        self.caches = [torch.zeros(shape, dtype=dtype, device="cuda") for _ in range(options.layers)]
        if graph_sizes:
            self.capture()
        self.sample(self.run(options.batch), options.batch)

    def capture(self) -> None:
        stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for size in reversed(graph_sizes):
                self.run(size)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    hidden = self.run(size)
                self.graphs[size] = (graph, alias(hidden))
                del hidden
        torch.cuda.current_stream().wait_stream(stream)

    def run(self, count: int) -> torch.Tensor:
        return self.model(self.ids[:count], self.places[:count], self.caches, self.slots[:count])

    def sample(self, hidden: torch.Tensor, count: int) -> list[int]:
        ends = self.starts[1 : count + 1] - 1
        last = hidden[ends]
        logits = self.model.head(last)
        logits = logits.float()
        probabilities = logits.softmax(-1, dtype=torch.float32)
        noise = torch.empty_like(probabilities).exponential_()
        return probabilities.div_(noise).argmax(-1).tolist()

    def take_pages(self, sequence: Sequence, tokens: int) -> bool:
        wanted = -(-tokens // options.page_tokens) - sequence.pages
        if wanted > self.free:
            return False
        self.free -= wanted
        sequence.pages += wanted
        return True

    def give_back(self, sequence: Sequence) -> None:
        self.free += sequence.pages
        sequence.pages = 0

    def schedule(self) -> list[tuple[Sequence, int]]:
        scheduled, budget, place, preempted = [], options.batched_tokens, 0, False
        while place < len(self.running) and budget > 0:
            sequence = self.running[place]
            new = min(sequence.known - sequence.computed, budget)
            while not self.take_pages(sequence, sequence.computed + new):
                newest = self.running.pop()
                self.give_back(newest)
                newest.computed, preempted = 0, True
                self.waiting.insert(0, newest)
                if newest is sequence:
                    break
            else:
                scheduled.append((sequence, new))
                budget -= new
                place += 1
                continue
            break
        while not preempted and self.waiting and len(self.running) < options.batch and budget > 0:
            sequence = self.waiting[0]
            new = min(sequence.known, budget)
            if not self.take_pages(sequence, new):
                break
            self.running.append(self.waiting.pop(0))
            scheduled.append((sequence, new))
            budget -= new
        return scheduled

    def step(self) -> None:
        scheduled = self.schedule()
        tokens = sum(new for _, new in scheduled)
        for buffer, count in [(self.ids, tokens), (self.places, tokens), (self.slots, tokens)]:
            buffer[:count].copy_(torch.zeros(count, dtype=buffer.dtype))
        self.starts[: len(scheduled) + 1].copy_(torch.zeros(len(scheduled) + 1, dtype=torch.int32))
        self.lengths[: len(scheduled)].copy_(torch.zeros(len(scheduled), dtype=torch.int32))
        self.table[: len(scheduled)].copy_(torch.zeros(len(scheduled), self.table.size(1), dtype=torch.int32))
        captured = next((size for size in graph_sizes if size >= tokens), None)
        if captured and all(new == 1 for _, new in scheduled):
            graph, hidden = self.graphs[captured]
            graph.replay()
            self.sample(hidden, len(scheduled))
            del hidden
        else:
            self.sample(self.run(tokens), len(scheduled))
        for sequence, new in scheduled:
            sequence.computed += new
            sequence.known += sequence.computed == sequence.known
            if sequence.known == context:
                self.running.remove(sequence)
                self.give_back(sequence)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, which the alias does not hold: the next graph of the pool may use it."""
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, tensor.nbytes)
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())


with torch.inference_mode():
    server = Server()
    server.start()
    left = options.requests
    while left or server.waiting or server.running:
        if left:
            left -= 1
            server.waiting.append(Sequence())
        server.step()
