"""The figures, tables and sentences that tools/publish.py checks, each with its source file and its computation."""

import csv
import functools
import importlib.util
import json
import math
import pathlib
import re
import statistics
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The folders of the measurements. A new campaign has the same file names in a new folder.
H200 = "results/2026-11-15-h200"
PYTHON = "results/2026-11-17-h200"
# What tools/campaign.py has measured so far.
CAMPAIGN = f"{PYTHON}/campaign"
RECORDED = "workloads/recorded"
# Claims that were measured and withdrawn: circular, or true by construction of the workload.
WITHDRAWN = {"slow-leak", "frag-sign", "batch-first", "hidden-data", "persistent", "profile", "snapshot", "leak-sign", "copies"}
# Workloads that have another name now than when they were measured.
RENAMED = {"gpt-124m": "reference-gpt-163m", "gpt-355m": "reference-gpt-406m", "gpt-1.3b": "reference-gpt-1.4b"}
RENAMED["gpt-moe-8x124m"] = "reference-gpt-moe-560m"
# Strategies whose defaults were others when they were measured.
SETTINGS_THEN = {
    "pool": ["pool:empty_cache:True,lazy_events:True"],
    "binning": ["binning:empty_cache:True,lazy_events:True"],
    "bfc": ["bfc:allow_growth:True,empty_cache:True", "bfc:allow_growth:True"],
}
EXPANDABLE = "caching:expandable_segments:True"

FIGURES, TABLES = {}, {}


def figure(name, *files):
    """Registers a function that computes a figure, as it stands in a text, from these files."""

    def add(compute):
        FIGURES[name] = (compute, files)
        return compute

    return add


def table(name):
    def add(compute):
        TABLES[name] = functools.cache(compute)
        return compute

    return add


USED = set()


@functools.cache
def value(name):
    USED.add(name)
    return str(FIGURES[name][0]())


def source(name):
    return ", ".join(FIGURES[name][1])


def unused_figures():
    """Figures that no sentence names: a sentence was changed and its rule forgotten."""
    return [f"tools/publish_rules.py: no text has the figure '{name}'" for name in sorted(set(FIGURES) - USED)]


# Reading.


@functools.cache
def rows(file):
    with open(ROOT / file, newline="") as lines:
        return tuple(csv.DictReader(lines))


@functools.cache
def text(file):
    return (ROOT / file).read_text()


@functools.cache
def document(file):
    return json.loads(text(file))


def cell(row, *names):
    """A number of a row, by its name now or then."""
    found = next((row[name] for name in names if row.get(name)), "")
    return float(found) if found else None


def thousands(number):
    return f"{round(number):,}"


def at_most(number, digits):
    """A number that a text calls the most: rounded up."""
    return f"{math.ceil(round(number * 10**digits, 6)) / 10**digits:.{digits}f}"


def shortest_and_longest(numbers, digits=1):
    numbers = list(numbers)
    return f"{min(numbers):.{digits}f}", f"{max(numbers):.{digits}f}"


def markdown(headings, body):
    """A table; a heading that ends with `:` is of a column of numbers."""
    rule = ["---:" if name.endswith(":") else "---" for name in headings]
    lines = [[name.rstrip(":") for name in headings], rule, *body]
    return ["|".join(["", *(f" {cell} " if at != 1 else str(cell) for cell in line), ""]) for at, line in enumerate(lines)]


def ratio_text(ratio):
    return f"{ratio:.2f}x"


# Strategies.


def nearest_rank(numbers, share):
    """The least number that at least this share of all numbers do not exceed."""
    numbers = sorted(numbers)
    return numbers[-(-len(numbers) * round(100 * share) // 100) - 1]


def short(number):
    return f"{number:.1f}" if number < 9.95 else f"{number:.0f}"


STRATEGY_NAMES = {
    "oomph": "`oomph` (ours)",
    "planned": "`planned` (STAlloc's idea)",
    EXPANDABLE: f"`{EXPANDABLE}`",
    "async": "`async` (cudaMallocAsync)",
    "caching": "`caching` (PyTorch's default)",
    "stitch": "`stitch` (GMLake)",
    "pool": "`pool` (RMM)",
    "bfc": "`bfc` (TensorFlow, XLA)",
    "binning": "`binning` (RMM)",
    "direct": "`direct` (cudaMalloc)",
}
STRATEGIES = f"{H200}/strategies/runs.csv"
SIMULATED = f"{H200}/simulated/strategies.csv"


# The same of the campaign.
NOW = f"{CAMPAIGN}/strategies/runs.csv"
NOW_SIMULATED = f"{CAMPAIGN}/simulated/strategies.csv"
NOW_BOUNDS = f"{CAMPAIGN}/strategies/bounds.csv"
NEEDS = f"{CAMPAIGN}/simulated/bounds.csv"


def bounds(file, split=""):
    """The rows of bounds.csv over all workloads, or over those of one split, by strategy."""
    return {row["strategy"]: row for row in rows(file) if row["split"] == split and not row["generator"]}


@table("need")
def need_table():
    """The least memory in which a program completes over its bound, simulated, and the driver time of the GPU."""
    body = []
    test, real = bounds(NEEDS, "test"), bounds(NOW_BOUNDS)
    for name, row in bounds(NEEDS).items():
        if name == "arena":
            continue
        interval = f"{cell(row, 'median_need_low_ratio'):.3f} to {cell(row, 'median_need_high_ratio'):.3f}"
        shown = [f"{cell(row, 'median_need_ratio'):.3f}", interval, f"{cell(row, 'p90_need_ratio'):.2f}"]
        shown += [f"{cell(row, 'worst_need_ratio'):.2f}", f"{cell(test[name], 'median_need_ratio'):.3f}"]
        shown += [f"{cell(row, 'median_appetite_ratio'):.3f}", f"{short(cell(real[name], 'driver_ns') / 1e9)} s"]
        body.append([STRATEGY_NAMES.get(name.split(":allow_growth")[0], f"`{name}`"), *shown])
    headings = ["strategy", "need:", "95 % interval:", "90th percentile:", "worst:", "need, test programs:", "appetite:", "driver time:"]
    return markdown(headings, body)


def any_row(file, split=""):
    return next(iter(bounds(file, split).values()))


figure("need.strategies", NEEDS)(lambda: len(bounds(NEEDS)))
figure("need.families", NEEDS)(lambda: any_row(NEEDS)["families"])
figure("need.patterns", NEEDS)(lambda: any_row(NEEDS)["patterns"])
figure("need.sources", NEEDS)(lambda: any_row(NEEDS)["cases"])
figure("need.test", NEEDS)(lambda: any_row(NEEDS, "test")["families"])


def of_strategy(name):
    return [row for row in rows(STRATEGIES) if row["strategy"] == name]


def multiples(name):
    bound = ("live_peak_rounded_bytes", "bound_rounded_bytes")
    return [cell(row, "peak_reserved_bytes") / cell(row, *bound) for row in of_strategy(name)]


@table("strategies")
def strategies_table():
    names = [name for name in {row["strategy"]: 0 for row in rows(STRATEGIES)} if name != "arena"]
    # By their median. `cub` and `direct` come last: their figures leave out page rounding.
    names.sort(key=lambda name: (name in ("cub", "direct"), name == "direct", statistics.median(multiples(name))))
    body = []
    for name in names:
        found = multiples(name)
        seconds = sum(cell(row, "driver_ns") for row in of_strategy(name)) / 1e9
        shown = f"{statistics.median(found):.3f}", f"{nearest_rank(found, 0.9):.2f}", short(max(found)), f"{short(seconds)} s"
        body.append([STRATEGY_NAMES.get(name, f"`{name}`"), *shown])
    return markdown(["strategy", "median:", "90th percentile:", "worst:", "driver time, all patterns:"], body)


figure("strategies.count", STRATEGIES)(lambda: len({row["strategy"] for row in rows(STRATEGIES)}))
figure("strategies.cases", STRATEGIES)(lambda: thousands(len(rows(STRATEGIES))))
figure("strategies.workloads", STRATEGIES)(lambda: len({row["workload"] for row in rows(STRATEGIES)}) - len(recordings()))
figure("strategies.recordings", STRATEGIES)(lambda: len(recordings()))


def recordings():
    return {row["workload"] for row in rows(STRATEGIES) if ".pickle" in row["workload"]}


@figure("strategies.programs", STRATEGIES)
def recorded_programs():
    """Recordings without their allocator settings and caps; another seed is another program."""
    names = [re.sub(r"_cap\d+", "", name.replace(".pickle.xz", "")) for name in recordings()]
    return len({name if name.endswith("seed2") else name.split(".")[0] for name in names})


@figure("strategies.patterns", STRATEGIES)
def different_patterns():
    """Patterns by content: the same numbers of events, requests and frees, and the same peak of live bytes, are one."""
    bound = ("live_peak_bytes", "bound_requested_bytes")
    key = lambda row: (row["events"], row["allocs"], row["frees"], cell(row, *bound))
    return len({key(row) for row in of_strategy("direct")})


def identity(row):
    """A case without its device and limit, by the names of today."""
    workload = RENAMED.get(row["workload"], row["workload"])
    return workload, row["strategy"], row.get("limit_bytes", ""), row["seed"]


def is_same_program(real, simulated):
    """Whether the workload still makes the requests that it made when the GPU ran it."""
    bounds = [cell(row, "live_peak_bytes", "bound_requested_bytes") for row in (real, simulated)]
    completed = real["status"] == simulated["status"] == "completed"
    return bounds[0] == bounds[1] and (not completed or real["events"] == simulated["events"])


def pairs(real, simulated):
    """Cases of a GPU with the same case on the simulated device, under the settings that were the defaults then."""
    there = {identity(row): row for row in rows(simulated)}
    for row in rows(real):
        workload, strategy, limit, seed = identity(row)
        names = [*SETTINGS_THEN.get(strategy, []), strategy]
        found = [there[key] for name in names if (key := (workload, name, limit, seed)) in there]
        if found and is_same_program(row, found[0]):
            yield row, found[0]


def compared():
    return [pair for pair in pairs(STRATEGIES, SIMULATED) if pair[0]["strategy"] not in ("async", "arena")]


def different():
    return [pair for pair in compared() if pair[0]["peak_reserved_bytes"] != pair[1]["peak_reserved_bytes"]]


figure("agree.compared", STRATEGIES, SIMULATED)(lambda: thousands(len(compared())))
figure("agree.same", STRATEGIES, SIMULATED)(lambda: thousands(len(compared()) - len(different())))
figure("agree.others", STRATEGIES, SIMULATED)(lambda: len(different()))


@table("agreement-of-strategies")
def agreement_table():
    """The cases whose peaks differ, by strategy."""
    body = []
    for name in {pair[0]["strategy"]: 0 for pair in different()}:
        mine = [pair for pair in different() if pair[0]["strategy"] == name]
        off = [100 * (cell(sim, "peak_reserved_bytes") / cell(real, "peak_reserved_bytes") - 1) for real, sim in mine]
        which = sorted({pair[0]["workload"].replace(".pickle.xz", "") for pair in mine})
        named = ", ".join(f"`{one}`" for one in which[:4]) + (f" and {len(which) - 4} more" if len(which) > 4 else "")
        body.append([f"`{name}`", len(mine), f"{min(off):+.1f} to {max(off):+.1f} %", named])
    return markdown(["strategy", "cases:", "simulated against the GPU:", "workloads"], body)


def driver_time_ratios(real, simulated):
    """Simulated driver time over the GPU's, per case, of strategies with the same settings."""
    found = {}
    for gpu, ours in pairs(real, simulated):
        if cell(gpu, "driver_ns"):
            found.setdefault(gpu["strategy"], []).append(cell(ours, "driver_ns") / cell(gpu, "driver_ns"))
    return found


def driver_time_table(real, simulated):
    body = []
    for name, found in driver_time_ratios(real, simulated).items():
        low, high = nearest_rank(found, 0.1), nearest_rank(found, 0.9)
        within = f"{100 * sum(0.5 <= ratio <= 2 for ratio in found) / len(found):.0f} %"
        body.append([f"`{name}`", f"{statistics.median(found):.2f}", f"{low:.2f} to {high:.2f}", within])
    return markdown(["strategy", "simulated / real, median:", "10th to 90th percentile:", "within a factor of 2:"], body)


table("driver-time")(lambda: driver_time_table(STRATEGIES, SIMULATED))
table("driver-time-now")(lambda: driver_time_table(NOW, NOW_SIMULATED))


def now_compared():
    return [pair for pair in pairs(NOW, NOW_SIMULATED) if pair[0]["strategy"] not in ("async", "arena")]


figure("now.compared", NOW, NOW_SIMULATED)(lambda: thousands(len(now_compared())))
figure("now.cases", NOW)(lambda: thousands(len(rows(NOW))))


@figure("now.same", NOW, NOW_SIMULATED)
def now_same():
    return thousands(sum(real["peak_reserved_bytes"] == ours["peak_reserved_bytes"] for real, ours in now_compared()))


# Step times of the campaign.

NOW_TECHNIQUES = [
    f"{CAMPAIGN}/techniques-{model}/techniques.csv" for model in ("reference-gpt-163m", "reference-gpt-406m", "resnet-50")
]
NOW_SIMULATED_TECHNIQUES = f"{CAMPAIGN}/simulated/techniques.csv"


@functools.cache
def step_ratios():
    """Simulated step time over the GPU's by model and technique."""
    key = lambda row: (row["model"], row["technique"])
    ours = {key(row): cell(row, "step_ns") for row in rows(NOW_SIMULATED_TECHNIQUES)}
    measured = [row for file in NOW_TECHNIQUES for row in rows(file) if cell(row, "step_ns") and ours.get(key(row))]
    return {key(row): ours[key(row)] / cell(row, "step_ns") for row in measured}


figure("steps.count", *NOW_TECHNIQUES)(lambda: len(step_ratios()))
figure("steps.within", *NOW_TECHNIQUES)(lambda: sum(0.9 <= ratio <= 1.1 for ratio in step_ratios().values()))
figure("steps.low", *NOW_TECHNIQUES)(lambda: f"{min(step_ratios().values()):.2f}")
figure("steps.high", *NOW_TECHNIQUES)(lambda: f"{max(step_ratios().values()):.2f}")


# RMM's own library.

RMM = f"{H200}/rmm_replay.txt"


def rmm_peaks():
    for name, kind, peak in re.findall(r"== (\S+) (pool|async|arena)\n.*?peak_reserved_bytes: (\d+)", text(RMM)):
        yield name, kind, int(peak)


@figure("rmm.same", RMM, STRATEGIES)
def rmm_same():
    ours = {(row["workload"].replace(".pickle.xz", ""), row["strategy"]): cell(row, "peak_reserved_bytes") for row in rows(STRATEGIES)}
    return sum(ours[name, kind] == peak for name, kind, peak in rmm_peaks() if kind == "pool")


figure("rmm.traces", RMM)(lambda: len({name for name, _, _ in rmm_peaks()}))


# Recordings and workloads against the driver's answers.

AGREEMENT = f"{H200}/agreement/recordings.csv"
THROUGHPUT = f"{H200}/agreement/throughput.txt"
ASYNC = f"{H200}/agreement/async.txt"


def off(row):
    return abs(cell(row, "peak_reserved_difference_percent") or 0)


figure("verify.events", AGREEMENT)(lambda: thousands(sum(int(row["events"]) for row in rows(AGREEMENT))))
figure("verify.agreed", AGREEMENT)(lambda: thousands(sum(int(row["events_agreed"]) for row in rows(AGREEMENT))))
figure("verify.cases", AGREEMENT)(lambda: len(rows(AGREEMENT)))
figure("verify.same", AGREEMENT)(lambda: sum(off(row) == 0 for row in rows(AGREEMENT)))
figure("verify.off", AGREEMENT)(lambda: at_most(max(off(row) for row in rows(AGREEMENT)), 2))


def throughput_rows():
    found = re.findall(r"^ (.{32}) (\S+) +(\d+) +(\d+) % .* (\S+) % +(\S+) %$", text(THROUGHPUT), re.M)
    name = ""
    for source, strategy, events, same, reserved, _ in found:
        name = source.strip() or name
        yield name, strategy, int(events), int(same), float(reserved)


figure("throughput.events", THROUGHPUT)(lambda: thousands(sum(row[2] for row in throughput_rows())))
figure("throughput.agreed", THROUGHPUT)(lambda: thousands(sum(row[2] for row in throughput_rows() if row[3] == 100)))
figure("throughput.off", THROUGHPUT)(lambda: at_most(max(abs(row[4]) for row in throughput_rows()), 1))
figure("async.mean", ASYNC)(lambda: re.search(r"([\d.]+) % off on average", text(ASYNC)).group(1))
figure("async.most", ASYNC)(lambda: re.search(r"at most -([\d.]+) %", text(ASYNC)).group(1))


AGREEMENT_NOW, ASYNC_NOW = f"{CAMPAIGN}/agreement.csv", f"{CAMPAIGN}/agreement-async.csv"


def off_now(file):
    return [100 * abs(cell(row, "peak_reserved_difference_share") or 0) for row in rows(file)]


figure("verify-now.events", AGREEMENT_NOW)(lambda: thousands(sum(int(row["events"]) for row in rows(AGREEMENT_NOW))))
figure("verify-now.agreed", AGREEMENT_NOW)(lambda: thousands(sum(int(row["events_agreed"]) for row in rows(AGREEMENT_NOW))))
figure("verify-now.cases", AGREEMENT_NOW)(lambda: len(rows(AGREEMENT_NOW)))
figure("verify-now.same", AGREEMENT_NOW)(lambda: sum(one == 0 for one in off_now(AGREEMENT_NOW)))
figure("verify-now.off", AGREEMENT_NOW)(lambda: at_most(max(off_now(AGREEMENT_NOW)), 2))
figure("async-now.mean", ASYNC_NOW)(lambda: f"{statistics.mean(off_now(ASYNC_NOW)):.2f}")
figure("async-now.most", ASYNC_NOW)(lambda: at_most(max(off_now(ASYNC_NOW)), 2))


# Leaks and thresholds.

LEAKS = f"{H200}/leaks/runs.csv"
SIMULATED_LEAKS = f"{H200}/simulated/leaks.csv"
THRESHOLDS = f"{H200}/oom-thresholds/thresholds.csv"


def leak_pairs():
    return list(pairs(LEAKS, SIMULATED_LEAKS))


def same_step(pair):
    return pair[0]["oom_step"] == pair[1]["oom_step"]


figure("leaks.cases", LEAKS, SIMULATED_LEAKS)(lambda: len(leak_pairs()))
figure("leaks.same", LEAKS, SIMULATED_LEAKS)(lambda: sum(map(same_step, leak_pairs())))


@table("leaks")
def leaks_table():
    body = [
        [f"`{real['workload']}`", f"`{real['strategy']}`", real["oom_step"] or "none", simulated["oom_step"] or "none"]
        for real, simulated in leak_pairs()
        if not same_step((real, simulated))
    ]
    return markdown(["workload", "strategy", "step on the GPU:", "simulated:"], body)


def count_thresholds(file, confirmed):
    return sum(row["confirmed"] in confirmed for row in rows(file))


def thresholds_table(file):
    """The thresholds that are not confirmed, by strategy."""
    wrong = [row for row in rows(file) if row["confirmed"] == "false"]
    body = []
    for name in {row["strategy"]: 0 for row in wrong}:
        mine = [row for row in wrong if row["strategy"] == name]
        low = [row["workload"] for row in mine if row["real_below"] == "completed"]
        high = [row["workload"] for row in mine if row["real_above"] != "completed"]
        body.append([f"`{name}`", len(mine), ", ".join(f"`{one}`" for one in low), ", ".join(f"`{one}`" for one in high)])
    return markdown(["strategy", "cases:", "completes with 2 MiB less", "does not complete with 2 MiB more"], body)


for name, file in [("thresholds", THRESHOLDS), ("thresholds-now", f"{CAMPAIGN}/oom-thresholds/thresholds.csv")]:
    figure(f"{name}.cases", file)(functools.partial(count_thresholds, file, ("true", "false")))
    figure(f"{name}.confirmed", file)(functools.partial(count_thresholds, file, ("true",)))
    table(name)(functools.partial(thresholds_table, file))


# Techniques.

TECHNIQUES = f"{H200}/techniques/techniques.csv"
SIMULATED_TECHNIQUES = f"{H200}/simulated/techniques.csv"
STEP_TIMINGS = f"{RECORDED}/step_timings.csv"
MODEL = "reference-gpt-406m"


def reduction(row, kind):
    percent = cell(row, "reduction_percent" if kind == "allocated" else "reserved_reduction_percent")
    share = cell(row, f"{kind}_reduction_share")
    return percent if percent is not None else 100 * share if share is not None else None


def technique(name):
    is_it = lambda row: (RENAMED.get(row["model"], row["model"]), row["technique"]) == (MODEL, name)
    return next(row for row in rows(TECHNIQUES) if is_it(row))


TECHNIQUE_TITLES = {
    "half_batch": ("half the batch (half the work)", "10-40 %", ""),
    "amp": ("mixed precision (autocast, bf16) against fp32", "25-35 %", "5-15 % faster"),
    "amp/tf32": ("the same against TF32", "", ""),
    "ckpt": ("checkpointing, every layer", "40-60 % of activations", "20-40 % slower"),
    "accum4": ("accumulation over 4 micro-batches", "0-15 %", "longer"),
    "offload": ("offloading activations", "30-50 %", "significant latency"),
    "inplace": ("in-place activations", "5-10 % on CNNs", ""),
    "amp+ckpt": ("mixed precision and checkpointing", "", ""),
}
PYTORCH_RUNS = {
    "half_batch": "train_halfbatch",
    "amp": "train_amp",
    "ckpt": "train_ckpt",
    "accum4": "train_accum4",
    "offload": "train_offload",
    "inplace": "train_inplace",
    "amp+ckpt": "train_ckpt_amp",
    "empty_cache": "train_emptycache",
    "zero_fill": "train_zero_fill",
}


def pytorch(name, variant="fp32"):
    """What PyTorch's own run saves, allocated and reserved, and its step against the base of the same precision."""
    run = lambda name, kind: next(r for r in rows(STEP_TIMINGS) if (r["run"], r["variant"]) == (name, f"gpt-355M {kind}"))
    mine, base = run(PYTORCH_RUNS[name], "fp32"), run("train_base", variant)
    saved = [100 * (1 - cell(mine, f"peak_{kind}") / cell(base, f"peak_{kind}")) for kind in ("allocated", "reserved")]
    return *saved, cell(mine, "median_step_ms") / cell(base, "median_step_ms")


@table("techniques")
def techniques_table():
    body = []
    for name, (title, memory, speed) in TECHNIQUE_TITLES.items():
        row = technique(name.split("/")[0])
        saved = [f"{reduction(row, kind) + 0.0:.1f} %" for kind in ("allocated", "reserved")]
        step = cell(row, "step_ratio")
        if name == "amp/tf32":
            saved, step = ["", ""], step / cell(technique("tf32"), "step_ratio")
        there = pytorch("amp", "tf32") if name == "amp/tf32" else pytorch(name)
        body.append([title, *saved, memory, ratio_text(step), ratio_text(there[2]), speed])
    headings = ["technique", "allocated less:", "reserved less:", "published", "step time:", "PyTorch's own step:", "published"]
    return markdown(headings, body)


@figure("techniques.per_sample", TECHNIQUES)
def time_per_sample():
    return f"{2 * cell(technique('half_batch'), 'step_ratio'):.2f}"


@figure("techniques.count", TECHNIQUES)
def number_of_techniques():
    return len({row["technique"] for row in rows(TECHNIQUES)} - {"base"})


@figure("techniques.memory_off", TECHNIQUES, STEP_TIMINGS)
def memory_off():
    """The largest difference to PyTorch's own runs, in points of the saving of allocated memory."""
    return at_most(max(abs(reduction(technique(name), "allocated") - pytorch(name)[0]) for name in PYTORCH_RUNS), 1)


@table("techniques-pytorch")
def techniques_pytorch_table():
    body = []
    for name in PYTORCH_RUNS:
        row, there = technique(name), pytorch(name)
        step = cell(row, "step_ratio")
        saved = [f"{reduction(row, kind):.1f}, {there[at]:.1f} %" for at, kind in enumerate(("allocated", "reserved"))]
        body.append([f"`{name}`", *saved, f"{step:.3f}, {there[2]:.3f}", f"{100 * (step / there[2] - 1):+.1f} %"])
    headings = ["technique", "allocated less: here, PyTorch:", "reserved less: here, PyTorch:", "step ratio: here, PyTorch:"]
    return markdown([*headings, "step ratio differs by:"], body)


@table("techniques-simulated")
def techniques_simulated_table():
    """Rows of each model, and how far the simulated ones are off."""
    there = {(row["model"], row["technique"]): row for row in rows(SIMULATED_TECHNIQUES)}
    body = []
    for model in {row["model"]: 0 for row in rows(TECHNIQUES)}:
        mine = [row for row in rows(TECHNIQUES) if row["model"] == model]
        done = [row for row in mine if row["status"] == "completed"]
        ran_out = sum(row["status"] == "oom" for row in mine)
        names = {row["technique"]: there.get((RENAMED.get(model, model), row["technique"])) for row in done}
        timed = [row for row in done if names[row["technique"]] and cell(row, "step_ratio") and cell(names[row["technique"]], "step_ratio")]
        steps = [100 * (cell(names[row["technique"]], "step_ratio") / cell(row, "step_ratio") - 1) for row in timed]
        memory = [abs(reduction(names[row["technique"]], "allocated") - reduction(row, "allocated")) for row in timed]
        shown = [f"{min(steps):+.0f} to {max(steps):+.0f} %", f"{max(memory):.1f} points"] if timed else ["", ""]
        body.append([f"`{model}`", len(mine), len(done), ran_out, len(mine) - len(done) - ran_out, *shown])
    headings = ["model", "rows:", "completed:", "out of memory:", "not possible:", "simulated step ratio:", "simulated saving:"]
    return markdown(headings, body)


CONFIRMED = f"{H200}/techniques/confirmed.txt"


def confirmed():
    return [float(a) / float(b) for a, b in re.findall(r"ran on the device in .*?: ([\d.]+) a second, ([\d.]+) simulated", text(CONFIRMED))]


figure("confirmed.count", CONFIRMED)(lambda: len(confirmed()))
figure("confirmed.low", CONFIRMED)(lambda: math.floor(100 * min(confirmed())))
figure("confirmed.high", CONFIRMED)(lambda: math.ceil(100 * max(confirmed())))


# The one allocation of `arena`.

PROFILE = "crates/alloc/src/device/sim/h200.toml"


def arena(name):
    runs = rows(f"{CAMPAIGN}/strategies/runs.csv")
    return statistics.median(float(row[name]) for row in runs if row["strategy"] == "arena" and row["driver_alloc_calls"] == "1")


@figure("arena.profile", PROFILE)
def arena_in_profile():
    costs = tomllib.loads(text(PROFILE))["cost"]
    largest = max((cost for cost in costs if cost["call"] == "cuMemAlloc"), key=lambda cost: cost["bytes"])
    return f"{largest['median_us'] / 1e3:.1f}"


figure("arena.gib", f"{CAMPAIGN}/strategies/runs.csv")(lambda: f"{arena('peak_reserved_bytes') / 2**30:.1f}")
figure("arena.ms", f"{CAMPAIGN}/strategies/runs.csv")(lambda: f"{arena('driver_alloc_ns') / 1e6:.1f}")


# Suites that are measured in parts.

FRAGMENTATION_NOW = f"{CAMPAIGN}/fragmentation"
figure("fragmentation-now.cases", f"{FRAGMENTATION_NOW}/runs.csv")(lambda: len(rows(f"{FRAGMENTATION_NOW}/runs.csv")))
figure("fragmentation-now.planned", f"{FRAGMENTATION_NOW}/plan.csv")(lambda: len(rows(f"{FRAGMENTATION_NOW}/plan.csv")))
figure("throughput-now.cases", f"{CAMPAIGN}/throughput/runs.csv")(lambda: len(rows(f"{CAMPAIGN}/throughput/runs.csv")))


# Claims.

# By folder: that of the campaign, and the older one, whose file has the claims that were withdrawn since.
CLAIMS = {"claims": f"{CAMPAIGN}/claims", "claims-then": f"{H200}/claims"}


def claims(file, verdict=None):
    kept = [row for row in rows(file) if row["id"] not in WITHDRAWN]
    return sum(verdict in (None, row["verdict"]) for row in kept)


for name, folder in CLAIMS.items():
    file = f"{folder}/claims.csv"
    figure(f"{name}.count", file)(functools.partial(claims, file))
    for verdict in ("confirmed", "depends", "refuted", "not_measurable"):
        figure(f"{name}.{verdict}", file)(functools.partial(claims, file, verdict))
file = f"{H200}/claims/claims.csv"
figure("claims-then.withdrawn", file)(lambda file=file: len(rows(file)) - claims(file))


# Correctness.

INTEGRITY = f"{H200}/stress/integrity.json"
SOAK = f"{H200}/stress/soak.json"
PROMISES = f"{H200}/stress/promises.txt"
TESTS = f"{H200}/stress/tests.txt"
TRAINING = f"{H200}/stress/training.txt"


def total(file, name):
    return sum(row[name] for row in document(file)["strategies"])


figure("integrity.blocks", INTEGRITY)(lambda: thousands(total(INTEGRITY, "blocks")))
figure("integrity.millions", INTEGRITY)(lambda: f"{total(INTEGRITY, 'blocks') / 1e6:.1f}")
figure("integrity.terabytes", INTEGRITY)(lambda: f"{total(INTEGRITY, 'compared_bytes') / 1e12:.1f}")
figure("integrity.damaged", INTEGRITY)(lambda: total(INTEGRITY, "damaged"))
figure("integrity.strategies", INTEGRITY)(lambda: len(document(INTEGRITY)["strategies"]))
figure("integrity.seconds", INTEGRITY)(lambda: round(sum(one["wall_ns"] for one in document(INTEGRITY)["slices"]) / 1e9))
figure("integrity.threads", INTEGRITY)(lambda: max(one["threads"] for one in document(INTEGRITY)["slices"]))
figure("integrity.streams", INTEGRITY)(lambda: max(one["streams"] for one in document(INTEGRITY)["slices"]))
figure("soak.blocks", SOAK)(lambda: thousands(total(SOAK, "blocks")))
figure("soak.faults", SOAK)(lambda: thousands(total(SOAK, "faults")))
figure("soak.damaged", SOAK)(lambda: total(SOAK, "damaged"))
figure("soak.violations", SOAK)(lambda: total(SOAK, "violations"))
STRESS_NOW = {name: f"{CAMPAIGN}/{name}.txt" for name in ("integrity-large", "integrity-small", "soak")}


def stressed(name, word):
    """A number before a word of the last line, such as `8831291 blocks`."""
    return int(re.search(rf"(\d+) {word}", text(STRESS_NOW[name])).group(1))


for name, file in STRESS_NOW.items():
    for word in ("blocks", "damaged"):
        figure(f"stress-now.{name}.{word}", file)(lambda name=name, word=word: thousands(stressed(name, word)))


figure("promises.properties", PROMISES)(lambda: max(map(int, re.findall(r"properties +\w+ +passed +(\d+)", text(PROMISES)))))
figure("promises.faults", PROMISES)(lambda: thousands(sum(map(int, re.findall(r"faults +\w+ +passed +(\d+)", text(PROMISES))))))
figure("tests.conformance", TESTS)(lambda: len(re.findall(r": 0 findings$", text(TESTS), re.M)))


@table("training")
def training_table():
    """PyTorch with its own allocator and with ours."""
    found = re.findall(r"^(\S+) +(native|equal|\S+) +\S+ +(\d+) +\d+ +([\d.]+) +[\d.]+$", text(TRAINING), re.M)
    body = []
    for name, losses, reserved, step in found:
        native = name == "native"
        title = "PyTorch's own" if native else f"`{name}`"
        body.append([title, "" if native else losses, f"{thousands(int(reserved))} MiB", f"{float(step):.1f} ms"])
    return markdown(["allocator", "losses", "peak reserved:", "step:"], body)


@figure("training.slowest", TRAINING)
def slowest_training():
    ratios = [float(ratio) for ratio in re.findall(r" ([\d.]+)$", text(TRAINING), re.M)]
    return f"{100 * (max(ratios) - 1):.1f}"


ALLOCATOR = "results/2026-11-18-h200"
RUNS_UNDER_ALLOCATORS = f"{ALLOCATOR}/allocator.jsonl"
PROGRAMS_UNDER_ALLOCATORS = {
    "swiglu_var": "transformer, lengths and batches vary",
    "unet": "convolutional net, resolutions vary",
    "moe": "mixture of experts",
    "serving": "server, growing caches",
    "prefetch": "batches copied on a side stream",
    "fsdp": "FSDP2, one rank",
    "embeddings": "embedding bags",
    "swiglu": "transformer, one shape",
    "graphed": "step captured as a CUDA graph",
    "gpt2": "GPT-2 of transformers",
    "llama": "Llama of transformers, lengths vary",
    "graph_server": "server with CUDA graphs",
}


@functools.cache
def rows_of_compare(table, file):
    """The rows that a table of tools/torch-plugin/compare.py has for a file of runs, by program."""
    script = pathlib.Path(__file__).resolve().parent / "torch-plugin/compare.py"
    spec = importlib.util.spec_from_file_location("compare", script)
    compare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compare)
    rows = getattr(compare, table)([json.loads(line) for line in text(file).splitlines()])
    return {row[0]: row[1:] for row in rows[1:]}


@table("allocators")
def allocators_table():
    """Programs under PyTorch's allocators and under ours."""
    body = []
    for name, cells in rows_of_compare("summary", RUNS_UNDER_ALLOCATORS).items():
        *over, _native_ms, _expandable_ms, _ours_ms, same_step = cells[:7]
        body.append([PROGRAMS_UNDER_ALLOCATORS[name], *(f"{float(value):.3f}" for value in over), same_step])
    return markdown(["program", "native:", "expandable:", "`oomph`:", "step, `oomph` over the better:"], body)


@table("allocator-steps")
def allocator_steps_table():
    """Step times and driver calls."""
    body = []
    for name, cells in rows_of_compare("summary", RUNS_UNDER_ALLOCATORS).items():
        body.append([PROGRAMS_UNDER_ALLOCATORS[name], *cells[3:]])
    heads = ["program", "native, ms:", "expandable:", "`oomph`:", "same step:", "all but the first:"]
    return markdown([*heads, "first 3 steps, ms:", "driver calls in late steps:"], body)


@table("allocator-results")
def allocator_results_table():
    """Whether what was trained is equal bit by bit."""
    found = rows_of_compare("verdicts", f"{ALLOCATOR}/allocator-check.jsonl")
    # Without the digest of another result.
    body = [[name, *(cell.split()[0].lower() for cell in cells)] for name, cells in found.items()]
    return markdown(["program", "native again", "expandable", "`oomph`"], body)


@table("adversary")
def adversary_table():
    """Memory needed in Robson's worst case as a multiple of what is alive."""
    found = {}
    for at, name in enumerate(("adversary.txt", "adversary-64mib.txt")):
        for strategy, needed in re.findall(r"^ (\S+) .*?(?:GiB|MiB) +(\d+\.\d{3})(?: |$)", text(f"{H200}/stress/{name}"), re.M):
            found.setdefault(strategy, ["", ""])[at] = needed
    body = [[f"`{name}`", *needed] for name, needed in found.items()]
    return markdown(["strategy", "4 GiB alive, from 2 MiB:", "16 GiB alive, from 64 MiB:"], body)


# Speed.

PEERS_THEN = [f"{H200}/against_peers.txt", f"{H200}/against_peers_pairs.txt"]
PEERS = f"{CAMPAIGN}/peers-pairs.csv"
PEERS_IN_THREADS = f"{CAMPAIGN}/peers-threads.csv"


def peers(file):
    """Rows of a bench: settings, case, and nanoseconds by column."""
    columns = []
    for line in text(file).splitlines():
        kind, *cells = re.split(r" {2,}", line.strip())
        if cells and cells[0] == "case":
            columns = cells[1:]
        elif cells and columns and kind in ("native", "expandable"):
            yield kind, cells[0], {name: float(cell.removesuffix(" ns")) for name, cell in zip(columns, cells[1:])}


PEER_CASES = [("native", "hot 4 KiB"), ("native", "random live 1000"), ("native", "random live 10000")]
PEER_CASES += [("expandable", "hot 4 KiB"), ("expandable", "random live 1000"), ("expandable", "random live 10000")]
CASE_TITLES = {"hot 4 KiB": "hot pair, 4 KiB", "random live 1000": "mix, 1,000 live", "random live 10000": "mix, 10,000 live"}


def turns(file, settings, allocator, case):
    """Nanoseconds of every turn."""
    found = {row["turn"]: row for row in rows(file) if (row["settings"], row["allocator"], row["case"]) == (settings, allocator, case)}
    return [float(row["ns_per_pair"]) for _, row in sorted(found.items())]


def speed_up(file, settings, case):
    """The ratio of each turn: PyTorch's time over that of `caching` by address."""
    pairs_of_turns = zip(turns(file, settings, "PyTorch", case), turns(file, settings, "address", case))
    return [theirs / ours for theirs, ours in pairs_of_turns]


@table("peers")
def peers_table():
    body = []
    for settings, case in PEER_CASES:
        title = CASE_TITLES[case] + (", expandable" if settings == "expandable" else "")
        found = [turns(PEERS, settings, name, case) for name in ("PyTorch", "RMM pool", "RMM arena", "RMM async", "address", "handle")]
        times = [f"{statistics.median(one):.0f}" if one else "" for one in found]
        ratios = speed_up(PEERS, settings, case)
        body.append([title, *times, f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"])
    headings = ["case", "PyTorch:", "RMM pool:", "RMM arena:", "RMM async:", "`caching` by address, locked:", "by handle:"]
    return markdown([*headings, "PyTorch / by address:"], body)


figure("peers.turns", PEERS)(lambda: len(turns(PEERS, "native", "PyTorch", "hot 4 KiB")))
figure("peers.turns.threads", PEERS_IN_THREADS)(lambda: len(speed_up(PEERS_IN_THREADS, "native", "16 threads")))
for end, suffix in enumerate(("low", "high")):

    @figure(f"peers.threads.{suffix}", PEERS_IN_THREADS)
    def threads_range(end=end):
        cases = {row["case"] for row in rows(PEERS_IN_THREADS)}
        return shortest_and_longest(statistics.median(speed_up(PEERS_IN_THREADS, "native", case)) for case in cases)[end]


def speed_range(file, settings, case, number, end):
    found = [row[number] for kind, name, row in peers(PEERS_THEN[file]) if kind == settings and name.startswith(case)]
    return shortest_and_longest(found)[end]


for run in (0, 1):
    for settings in ("native", "expandable"):
        for short_name, case in (("hot", "hot"), ("mix", "random")):
            for end, suffix in enumerate(("low", "high")):
                compute = functools.partial(speed_range, run, settings, case, "x PyTorch", end)
                figure(f"speed{run + 1}.{settings}.{short_name}.{suffix}", PEERS_THEN[run])(compute)


def thread_range(end):
    found = [row["x PyTorch"] for _, name, row in peers(PEERS_THEN[0]) if "thread" in name]
    return shortest_and_longest(found)[end]


figure("speed1.threads.low", PEERS_THEN[0])(functools.partial(thread_range, 0))
figure("speed1.threads.high", PEERS_THEN[0])(functools.partial(thread_range, 1))

REPLAY = f"{H200}/replay_cost.txt"


def replay_costs():
    return {name: float(cost) for name, cost in re.findall(r"^(\S+) +\d+ +([\d.]+) +[\d.]+$", text(REPLAY), re.M)}


figure("replay.low", REPLAY)(lambda: f"{min(replay_costs().values()):.0f}")
figure("replay.high", REPLAY)(lambda: f"{max(cost for name, cost in replay_costs().items() if name != 'training'):.0f}")
figure("replay.training", REPLAY)(lambda: f"{replay_costs()['training']:.0f}")


# Programs and models on the GPU.

MODELS, PROGRAMS, ANSWERS = (f"{PYTHON}/{name}.csv" for name in ("models", "programs", "answers"))
COST = f"{PYTHON}/python/cost.txt"


def peaks(row):
    """Both peaks of a row, each on the GPU and beside it."""
    allocated, reserved = [], []
    for name in row:
        if name.endswith("allocated"):
            allocated.append(float(row[name]))
        elif name.endswith("reserved"):
            reserved.append(float(row[name]))
    return allocated, reserved


def apart(pair):
    return 100 * abs(pair[1] / pair[0] - 1)


def difference(file, which, without=()):
    return max(apart(peaks(row)[which]) for row in rows(file) if not any(word in next(iter(row.values())) for word in without))


def equal(file, both=True):
    return sum(apart(a) == 0 and (apart(b) == 0 or not both) for a, b in map(peaks, rows(file)))


figure("models.count", MODELS)(lambda: len(rows(MODELS)))
figure("models.equal", MODELS)(lambda: equal(MODELS))
figure("models.allocated", MODELS)(lambda: equal(MODELS, both=False))
figure("models.off_allocated", MODELS)(lambda: at_most(difference(MODELS, 0, ['t5']), 2))
figure("models.off_reserved", MODELS)(lambda: at_most(difference(MODELS, 1, ['t5']), 2))
figure("programs.count", PROGRAMS)(lambda: len(rows(PROGRAMS)))
figure("programs.settings", PROGRAMS)(lambda: sum("server.py" not in row["program"] for row in rows(PROGRAMS)))
figure("programs.equal", PROGRAMS)(lambda: equal(PROGRAMS))
figure("programs.off", PROGRAMS)(lambda: f"{difference(PROGRAMS, 0):.2f}")
figure("answers.count", ANSWERS)(lambda: len(rows(ANSWERS)))
figure("answers.off", ANSWERS)(lambda: at_most(difference(ANSWERS, 0), 3))
figure("answers.same", ANSWERS)(lambda: sum(apart(peaks(row)[1]) == 0 for row in rows(ANSWERS)))
figure("answers.differ", ANSWERS)(lambda: sum(apart(peaks(row)[1]) > 0 for row in rows(ANSWERS)))
figure("answers.off_reserved", ANSWERS)(lambda: at_most(difference(ANSWERS, 1), 2))
figure("cost.ratio", COST)(lambda: re.search(r"rounds ([\d.]+),", text(COST)).group(1))
figure("cost.rounds", COST)(lambda: re.search(r"median of (\d+) rounds", text(COST)).group(1))
figure("cost.low", COST)(lambda: re.search(r"from ([\d.]+) to", text(COST)).group(1))
figure("cost.high", COST)(lambda: re.search(r" to ([\d.]+)$", text(COST), re.M).group(1))


# Predictions.

ACCURACY = "results/workload-accuracy/workload-accuracy.csv"
WHAT_IF = "results/what-if/what-if.csv"
RELEASES = "results/releases/releases.csv"


def accuracy_error():
    return max(abs(float(row["error_percent"])) for row in rows(ACCURACY))


def exact_levels():
    return sum(row["real_bytes"] == row["predicted_bytes"] for row in rows(ACCURACY))


figure("accuracy.exact", ACCURACY)(exact_levels)
figure("accuracy.count", ACCURACY)(lambda: len(rows(ACCURACY)))
figure("accuracy.error", ACCURACY)(lambda: f"{accuracy_error():.2f}")
figure("accuracy.most", ACCURACY)(lambda: at_most(accuracy_error(), 1))
figure("what-if.exact", WHAT_IF)(lambda: sum(r["real_peak_reserved_bytes"] == r["foretold_peak_reserved_bytes"] for r in rows(WHAT_IF)))
figure("what-if.ooms", WHAT_IF)(lambda: sum(row["real_oom"] == row["foretold_oom"] for row in rows(WHAT_IF)))
figure("what-if.count", WHAT_IF)(lambda: len(rows(WHAT_IF)))
figure("releases.programs", RELEASES)(lambda: thousands(min(int(row["programs"]) for row in rows(RELEASES))))
figure("releases.differences", RELEASES)(lambda: sum(int(row["differences"]) for row in rows(RELEASES)))


@table("releases")
def releases_table():
    body = [[row["pytorch"], row["programs"], row["calls"], row["differences"], row["ended_early"]] for row in rows(RELEASES)]
    return markdown(["PyTorch", "programs:", "calls:", "differences:", "ended early:"], body)


# The repository itself.

TRUTH = "tests/integration/models_truth/truth.csv"
figure("catalog.workloads", "workloads/*.toml")(lambda: len(list((ROOT / "workloads").glob("*.toml"))))
figure("recordings.count", f"{RECORDED}/*.pickle.xz")(lambda: len(list((ROOT / RECORDED).glob("*.pickle.xz"))))
figure("truth.programs", TRUTH)(lambda: len(rows(TRUTH)))


# Programs that ran out of memory.

FRAGMENTATION, LEAK, RECORD = (f"{H200}/out-of-memory/{name}.txt" for name in ("fragmentation", "leak", "record"))


def entries():
    found = [int(number) for number in re.findall(r"EXACT .*?: (\d+) entries", text(RECORD))]
    return found + [int(number) for file in (FRAGMENTATION, LEAK) for number in re.findall(r"in all (\d+) entries", text(file))]


def allocated_at_oom():
    return [float(number) for number in re.findall(r"Of the allocated memory ([\d.]+) GiB", text(RECORD))]


def of_message(at, pattern, file=RECORD):
    return re.findall(pattern, text(file))[at]


figure("oom.held", RECORD)(lambda: of_message(0, r"Of the allocated memory ([\d.]+) GiB"))
figure("oom.cached", RECORD)(lambda: of_message(0, r"and ([\d.]+) GiB is reserved by PyTorch but unallocated"))
figure("oom.free", RECORD)(lambda: f"{float(of_message(0, r'of which ([0-9.]+) MiB is free')):.0f}")
figure("oom.lost", RECORD)(lambda: f"{float(of_message(0, r'and ([0-9.]+) MiB is reserved by PyTorch but unallocated')):.0f}")
SLOPE = r"slope +(\d+) MiB a step of what is kept \(95 % interval (\d+) MiB to (\d+) MiB"
GROWS = r"who grows +(\d+) MiB a step, (\d+) -> (\d+) blocks"
for at, name in enumerate(("slope", "low", "high")):
    figure(f"leak.{name}", LEAK)(lambda at=at: thousands(int(of_message(0, SLOPE, LEAK)[at])))
for at, name in enumerate(("line", "first", "last")):
    figure(f"leak.{name}", LEAK)(lambda at=at: of_message(0, GROWS, LEAK)[at])
figure("oom.steps", FRAGMENTATION)(lambda: max(map(int, re.findall(r"^step +(\d+) ", text(FRAGMENTATION), re.M))) + 1)
figure("oom.further", RECORD)(lambda: f"{allocated_at_oom()[1] - allocated_at_oom()[0]:.1f}")
figure("oom.fewest", FRAGMENTATION, LEAK, RECORD)(lambda: thousands(min(entries())))
figure("oom.most", FRAGMENTATION, LEAK, RECORD)(lambda: thousands(max(entries())))


# Simulated runs.

KEPT = {
    "techniques": ["model", "technique", "status", "allocated_reduction_share", "reserved_reduction_share", "step_ratio", "step_ns"],
    None: ["suite", "workload", "strategy", "limit_bytes", "seed", "status", "events", "live_peak_bytes", "oom_step"]
    + ["peak_reserved_bytes", "driver_ns"],
}


def keep_simulated(name, folders):
    """Writes the columns that are compared of one or more run folders, each row with the commit of its run."""
    columns = KEPT.get(name, KEPT[None])
    place = ROOT / CAMPAIGN / "simulated" / f"{name}.csv"
    place.parent.mkdir(exist_ok=True)
    with open(place, "w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([*columns, "commit"])
        for folder in map(pathlib.Path, folders):
            commit = json.loads((folder / "env.json").read_text())["commit"]
            with open(folder / ("techniques.csv" if name == "techniques" else "runs.csv"), newline="") as lines:
                writer.writerows([*(row[column] for column in columns), commit] for row in csv.DictReader(lines))
    return place.relative_to(ROOT)


# Texts.

SENTENCES = {
    "README.md": [
        "18 strategies, {catalog.workloads} workloads, benchmark suites",
        "{need.strategies} strategies on {need.sources} workloads and recordings, {now.cases} cases. By content they are"
        " {need.patterns} patterns, and by program {need.families}, each counted once; {need.test} of the programs were not seen when",
        "to the byte in {now.same} of the {now.compared} cases that are neither `async` nor `arena`",
        "{steps.within} of {steps.count} step times of techniques are within 10 % of the GPU's",
        "what `pool` does on {rmm.same} of the {rmm.traces} traces",
        "([{techniques.count} techniques, 124M to 13B and ResNet-50]",
        "the same samples take {techniques.per_sample} times as long",
        "differ by at most {techniques.memory_off} points",
        "Of {claims.count} published claims about GPU memory {claims.confirmed} are confirmed there, {claims.refuted} refuted,"
        " {claims.depends} depend on the case, and {claims.not_measurable} cannot be measured",
        "the median of {peers.turns} turns",
        "{integrity.millions} million blocks and {integrity.terabytes} TB were filled and verified on that GPU under"
        " {integrity.strategies} strategies, from {integrity.threads} threads on {integrity.streams} streams, with"
        " {integrity.damaged} damaged bytes",
        "All {tests.conformance} strategies and variants pass conformance",
    ],
    "docs/allocators.md": [
        "At least {releases.programs} programs for each release from 2.0 to 2.15 gave {releases.differences} differences",
        "to the byte in {agree.same} of the {agree.compared} cases that are neither `async` nor `arena` and whose workload is unchanged since. [The other {agree.others}]",
    ],
    "docs/out-of-memory.md": [
        "PyTorch's message: {oom.held} GiB were held by the program, {oom.cached} GiB were cached in blocks too small, and {oom.free} MiB",
        "the program got {oom.further} GiB further and died in the same step, with {oom.lost} MiB lost",
        "a leak of {leak.slope} MiB per step (95 % interval {leak.low} to {leak.high} MiB",
        "{leak.line} MiB per step, {leak.first} -> {leak.last} blocks",
    ],
    "docs/will-it-fit.md": ["{truth.programs} real programs were rehearsed beside it"],
    "docs/suites.md": [
        "They are compared with {truth.programs} programs that were rehearsed",
        "predict {accuracy.exact} of {accuracy.count} memory levels to the byte, and none differs by more than {accuracy.most} %",
    ],
    "docs/recordings.md": [
        "All {recordings.count} recordings of the repository are EXACT",
        "equal to the byte in {what-if.exact} of {what-if.count} pairs, and OOM or no OOM is right in {what-if.ooms} of {what-if.count}",
    ],
    "results/what-if/what-if.md": [
        "to the byte in {what-if.exact} of {what-if.count} pairs, and whether memory runs out in {what-if.ooms} of {what-if.count}",
    ],
    "results/workload-accuracy/README.md": [
        "{accuracy.exact} of {accuracy.count} numbers are predicted to the byte; the largest error is {accuracy.error} %",
    ],
    f"{H200}/README.md": [
        "{strategies.count} strategies on {strategies.workloads} workloads and {strategies.recordings} recordings of"
        " {strategies.programs} PyTorch programs, {strategies.cases} cases. By content they are {strategies.patterns} different patterns",
        "every decision is the same: {verify.agreed} of {verify.events} events of the recordings",
        "and {throughput.agreed} of {throughput.events} of the workloads",
        "the same to the byte in {verify.same} of {verify.cases} cases and at most {verify.off} % off",
        "`throughput` differ by up to {throughput.off} %",
        "peak reserved is {async.mean} % off on average and {async.most} % at most",
        "as our `pool` on {rmm.same} of {rmm.traces} traces",
        "with {confirmed.count} techniques, the batch found for 24 GiB ran in 24 GiB, at {confirmed.low} to {confirmed.high} %",
        "**Claims**: of {claims-then.count}, {claims-then.confirmed} are confirmed, {claims-then.depends} depend,"
        " {claims-then.refuted} are refuted, {claims-then.not_measurable} cannot be measured here. Withdrawn since: {claims-then.withdrawn}",
        "**Integrity**: {integrity.blocks} blocks and {integrity.terabytes} TB verified in {integrity.seconds} s under"
        " {integrity.strategies} strategies, {integrity.threads} threads on {integrity.streams} streams: {integrity.damaged}"
        " damaged bytes. Soak: {soak.blocks} blocks with {soak.faults} injected driver errors: {soak.damaged} damaged,"
        " {soak.violations} violations",
        "properties ({promises.properties} programs each), misuse and faults ({promises.faults} faulty runs",
        "Conformance: all {tests.conformance} strategies",
        "step time within {training.slowest} % of native",
        "runs all {oom.steps} steps",
        "reaches {oom.further} GiB more",
        "({oom.fewest} to {oom.most} entries) are exact",
        "First run: hot pair {speed1.native.hot.low} to {speed1.native.hot.high}, mix {speed1.native.mix.low} to"
        " {speed1.native.mix.high}; with expandable segments {speed1.expandable.hot.low} to {speed1.expandable.hot.high} and"
        " {speed1.expandable.mix.low} to {speed1.expandable.mix.high}; threads {speed1.threads.low} to {speed1.threads.high}.",
        "slower machine: hot pair {speed2.native.hot.low} to {speed2.native.hot.high}, mix {speed2.native.mix.low} to"
        " {speed2.native.mix.high}; with expandable segments {speed2.expandable.hot.low} to {speed2.expandable.hot.high} and"
        " {speed2.expandable.mix.low} to {speed2.expandable.mix.high}.",
        "costs {replay.low} to {replay.high} ns per event; `training` {replay.training} ns",
        "to the byte in {agree.same} of the {agree.compared} cases",
        "equals the simulated one in {leaks.same} of {leaks.cases} cases",
        "{thresholds.confirmed} of {thresholds.cases} are confirmed",
    ],
    f"{PYTHON}/README.md": [
        "every decision is the same: {verify-now.agreed} of {verify-now.events} events",
        "the same to the byte in {verify-now.same} of {verify-now.cases} cases and at most {verify-now.off} % off",
        "peak reserved is {async-now.mean} % off on average and {async-now.most} % at most",
        "{thresholds-now.confirmed} of {thresholds-now.cases} are confirmed",
        "of {claims.count}, {claims.confirmed} are confirmed, {claims.depends} depend, {claims.refuted} are refuted,"
        " {claims.not_measurable} cannot be measured here",
        "{stress-now.integrity-large.blocks} large and {stress-now.integrity-small.blocks} small blocks verified,"
        " {stress-now.integrity-large.damaged} and {stress-now.integrity-small.damaged} damaged",
        "{stress-now.soak.blocks} blocks, {stress-now.soak.damaged} damaged",
        "{fragmentation-now.cases} of {fragmentation-now.planned} planned cases",
        "the {arena.gib} GiB of `arena` took {arena.ms} ms; in processes of their own, from which the profile has its costs, {arena.profile} ms",
        "all {throughput-now.cases} cases",
        "in {peers.turns.threads} turns: {peers.threads.low} to {peers.threads.high} times PyTorch's",
        "to the byte in {now.same} of the {now.compared} cases that are neither `async` nor `arena`",
        "of {steps.count} step times of techniques {steps.within} are within 10 % of the GPU's, all between {steps.low} and {steps.high} of it",
        "recorder over PyTorch's: {cost.ratio}, the median of {cost.rounds} rounds. Single rounds were between {cost.low} and {cost.high}",
        "peaks of {models.count} training programs",
        "{models.equal} are equal to the byte in both peaks, {models.allocated} in the allocated one",
        "differ by at most {models.off_allocated} % allocated and {models.off_reserved} % reserved",
        "{programs.settings} settings of the reference transformer",
        "{programs.equal} of {programs.count} are equal to the byte in both peaks",
        "allocated memory is {programs.off} % lower on the GPU",
        "peaks of {answers.count} programs on the GPU",
        "differ by at most {answers.off} %; reserved bytes are equal in {answers.same} and differ by at most"
        " {answers.off_reserved} % in {answers.differ}",
    ],
}
FILES = [*SENTENCES, "results/releases/README.md", f"{ALLOCATOR}/README.md"]

# Sections in which every number needs a rule: from one heading to the next one given, or to the end.
CHECKED = {
    "README.md": [("## Measured on", "\n## More")],
    f"{H200}/README.md": [("# Results\n", None)],
    f"{PYTHON}/README.md": [("- [python/cost.txt]", "\n# Models"), ("- [models.csv]", "\n# Plain"), ("- [programs.csv]", "\n# Answers")]
    + [("- [answers.csv]", "\n# The campaign"), ("- **Strategies**", None)],
    "docs/allocators.md": [("How exact is `caching`?", "### Releases"), ("In the strategies suite on an H200", "## On a GPU")],
}

ALLOWED = {
    "*": [
        (r"\]\([^)]*\)", "the address of a link"),
        (r"`[^`]*`", "a name or a command"),
        (r"PyTorch 2\.\d+|transformers 5\.\d+|5\.17 here|in 5\.17|from 2\.0 to 2\.15", "a version"),
    ],
    "README.md": [
        (r"GPT-355M|GPT of 124M|124M to 13B|ResNet-50|run [12]\b", "names of models and of runs"),
        (r"95 % intervals|within 10 %", "which interval, and which bar"),
    ],
    f"{H200}/README.md": [
        (r"GPT-355M|GPT of 124M|GPT-2|ResNet-50|13B|24 GiB|6 GiB|2 MiB", "names of models, and sizes that were asked for"),
        (r"\(9,880 and 9,731\)", "requests and frees of two recordings, counted in src/answer/claims/bench.rs"),
    ],
    f"{PYTHON}/README.md": [
        (r"12 layers, 1,024 wide|three steps|four servers|T5", "what was run"),
        (r"0\.1\.0|3\.12", "versions"),
        (r"within 10 %", "the bar"),
        (r"2 MiB (more|less)", "the distance of the confirming runs"),
    ],
    "docs/allocators.md": [(r"90 %", "the default limit of the program")],
}


def sections(file, text):
    for start, end in CHECKED.get(file, []):
        begin = text.index(start)
        yield begin, text.index(end, begin) if end else len(text)


# Pages that a program wrote beside its CSV: row by row the same.


def derived_pages():
    problems = []
    for page, lines in [("results/what-if/what-if.md", what_if_lines()), ("results/workload-accuracy/README.md", accuracy_lines())]:
        have = set(text(page).splitlines())
        problems += [f"{page}: this row of its CSV is missing: {line}" for line in lines if line not in have]
    for folder in CLAIMS.values():
        for row in rows(f"{folder}/claims.csv"):
            name = {"not_measurable": "not measurable here"}.get(row["verdict"], row["verdict"])
            line = next((line for line in text(f"{folder}/claims.md").splitlines() if f"**{row['id']}**:" in line), "")
            if f" {name} " not in line:
                problems.append(f"{folder}/claims.md: {row['id']} is not {name}")
    for folder in ("strategies", "leaks", "quick", "fragmentation", "throughput"):
        problems += summary_problems(f"{H200}/{folder}")
    return problems


def what_if_lines():
    for row in rows(WHAT_IF):
        real, foretold = int(row["real_peak_reserved_bytes"]), int(row["foretold_peak_reserved_bytes"])
        error = "0" if real == foretold else f"{100 * (foretold / real - 1):+.2f} %"
        settings = f"`{row['settings']}`" if row["settings"] else ""
        share = f"{100 * float(row['memory_fraction']):g} %" if row["memory_fraction"] else ""
        ooms = ["yes" if row[name] == "1" else "no" for name in ("real_oom", "foretold_oom")]
        yield "| " + " | ".join([row["from"], row["real"], settings, share, str(real), str(foretold), error, *ooms]) + " |"


def accuracy_lines():
    for row in rows(ACCURACY):
        real, predicted = int(row["real_bytes"]), int(row["predicted_bytes"])
        error = "0" if real == predicted else f"{100 * (predicted / real - 1):+.3f} %"
        yield f"| {row['run']} | {row['quantity']} | {real} | {predicted} | {error} |"


def size(number):
    """Bytes as the program shows them: three digits."""
    unit = 0
    while number >= 1024 and unit < 4:
        number, unit = number / 1024, unit + 1
    digits = 0 if unit == 0 else 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:.{digits}f} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][unit]}"


def summary_problems(folder):
    """Rows of summary.md whose peaks are not those of runs.csv."""
    lines = [line for line in text(f"{folder}/summary.md").splitlines() if line.startswith("| ")]
    cells = [[one.strip() for one in line.strip("|").split("|")] for line in lines]
    place = next((line.index("peak reserved") for line in cells if "peak reserved" in line), None)
    if place is None:
        return [f"{folder}/summary.md: no column 'peak reserved'"]
    wide = max(len(line) for line in cells if "peak reserved" in line)
    shown = [line for line in cells if len(line) == wide and "peak reserved" not in line]
    want = [row for row in rows(f"{folder}/runs.csv") if row["peak_reserved_bytes"]]
    if len(shown) < len(want):
        return [f"{folder}/summary.md: {len(shown)} rows, and runs.csv has {len(want)}"]
    wrong = [
        f"{folder}/summary.md: {row['case_id']}: {line[place]} reserved, runs.csv has {size(cell(row, 'peak_reserved_bytes'))}"
        for line, row in zip(shown, want)
        if size(cell(row, "peak_reserved_bytes")) != line[place]
    ]
    return wrong
