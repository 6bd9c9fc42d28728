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
# The folders of the measurements: programs and models, what tools/campaign.py measured, and two days with other questions.
PYTHON = "results/2026-11-17-h200"
CAMPAIGN = f"{PYTHON}/campaign"
ALLOCATOR = "results/2026-11-18-h200"
LATEST = "results/2026-11-19-h200"
RECORDED = "workloads/recorded"
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


def cell(row, name):
    """A number of a row; nothing where it is empty."""
    return float(row[name]) if row.get(name) else None


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


# `oomph` as it is since the campaign.
CHANGED = f"{LATEST}/oomph-simulated-bounds.csv"
for name in ("need", "appetite"):
    figure(f"changed.{name}", CHANGED)(
        lambda name=name: f"{next(float(row[f'median_{name}_ratio']) for row in rows(CHANGED) if not row['split'] and not row['generator']):.3f}"
    )
CHANGED_CASES = f"{LATEST}/oomph-strategies.csv"


def changed_times():
    return [cell(row, "simulated_driver_ns") / cell(row, "driver_ns") for row in rows(CHANGED_CASES)]


figure("changed.cases", CHANGED_CASES)(lambda: len(rows(CHANGED_CASES)))
figure("changed.same", CHANGED_CASES)(
    lambda: sum(row["peak_reserved_bytes"] == row["simulated_peak_reserved_bytes"] for row in rows(CHANGED_CASES))
)
figure("changed.time", CHANGED_CASES)(lambda: f"{statistics.median(changed_times()):.2f}")
figure("changed.near", CHANGED_CASES)(lambda: f"{100 * statistics.mean(0.5 <= time <= 2 for time in changed_times()):.0f}")


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
# On the GPU, and simulated.
STRATEGIES = f"{CAMPAIGN}/strategies/runs.csv"
SIMULATED = f"{CAMPAIGN}/simulated/strategies.csv"
BOUNDS = f"{CAMPAIGN}/strategies/bounds.csv"
NEEDS = f"{CAMPAIGN}/simulated/bounds.csv"


def bounds(file, split=""):
    """The rows of bounds.csv over all workloads, or over those of one split, by strategy."""
    return {row["strategy"]: row for row in rows(file) if row["split"] == split and not row["generator"]}


@table("need")
def need_table():
    """The least memory in which a program completes over its bound, simulated, and the driver time of the GPU."""
    body = []
    test, real = bounds(NEEDS, "test"), bounds(BOUNDS)
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


def identity(row):
    """A case without its device."""
    return row["workload"], row["strategy"], row.get("limit_bytes", ""), row["seed"]


def pairs(real, simulated):
    """Cases of a GPU with the same case on the simulated device."""
    there = {identity(row): row for row in rows(simulated)}
    for row in rows(real):
        found = there[identity(row)]
        same = ["live_peak_bytes", *(["events"] if row["status"] == found["status"] == "completed" else [])]
        if any(row[name] != found[name] for name in same):
            raise ValueError(f"{real} and {simulated} are of different programs: {identity(row)}")
        yield row, found


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


def driver_time_ratios():
    """Simulated driver time over the GPU's, per case."""
    found = {}
    for gpu, ours in pairs(STRATEGIES, SIMULATED):
        if cell(gpu, "driver_ns"):
            found.setdefault(gpu["strategy"], []).append(cell(ours, "driver_ns") / cell(gpu, "driver_ns"))
    return found


@table("driver-time")
def driver_time_table():
    body = []
    for name, found in driver_time_ratios().items():
        low, high = nearest_rank(found, 0.1), nearest_rank(found, 0.9)
        within = f"{100 * sum(0.5 <= ratio <= 2 for ratio in found) / len(found):.0f} %"
        body.append([f"`{name}`", f"{statistics.median(found):.2f}", f"{low:.2f} to {high:.2f}", within])
    return markdown(["strategy", "simulated / real, median:", "10th to 90th percentile:", "within a factor of 2:"], body)


figure("strategies.cases", STRATEGIES)(lambda: thousands(len(rows(STRATEGIES))))


# Techniques.

MODELS_OF_TECHNIQUES = ["reference-gpt-163m", "reference-gpt-406m", "reference-gpt-1.4b", "reference-gpt-13b", "resnet-50"]
TECHNIQUES = [f"{CAMPAIGN}/techniques-{model}/techniques.csv" for model in MODELS_OF_TECHNIQUES]
SIMULATED_TECHNIQUES = f"{CAMPAIGN}/simulated/techniques.csv"
STEP_TIMINGS = f"{RECORDED}/step_timings.csv"
MODEL = "reference-gpt-406m"


def technique_rows():
    return [row for file in TECHNIQUES for row in rows(file)]


@functools.cache
def step_ratios():
    """Simulated step time over the GPU's by model and technique."""
    key = lambda row: (row["model"], row["technique"])
    ours = {key(row): cell(row, "step_ns") for row in rows(SIMULATED_TECHNIQUES)}
    measured = [row for row in technique_rows() if cell(row, "step_ns") and ours.get(key(row))]
    return {key(row): ours[key(row)] / cell(row, "step_ns") for row in measured}


figure("steps.count", *TECHNIQUES, SIMULATED_TECHNIQUES)(lambda: len(step_ratios()))
figure("steps.within", *TECHNIQUES, SIMULATED_TECHNIQUES)(lambda: sum(0.9 <= ratio <= 1.1 for ratio in step_ratios().values()))
figure("steps.low", *TECHNIQUES, SIMULATED_TECHNIQUES)(lambda: f"{min(step_ratios().values()):.2f}")
figure("steps.high", *TECHNIQUES, SIMULATED_TECHNIQUES)(lambda: f"{max(step_ratios().values()):.2f}")


# RMM's own library.

RMM = f"{LATEST}/rmm_replay.txt"


def rmm_peaks():
    for part in text(RMM).split("== ")[1:]:
        name, kind = part.split()[:2]
        yield name, kind, int(re.search(r"peak_reserved_bytes: (\d+)", part).group(1))


@figure("rmm.same", RMM, STRATEGIES)
def rmm_same():
    ours = {(row["workload"].replace(".pickle.xz", ""), row["strategy"]): cell(row, "peak_reserved_bytes") for row in rows(STRATEGIES)}
    return sum(ours[name, kind] == peak for name, kind, peak in rmm_peaks() if kind == "pool")


figure("rmm.traces", RMM)(lambda: len({name for name, _, _ in rmm_peaks()}))


# Recordings against the driver's answers.

AGREEMENT, ASYNC = f"{CAMPAIGN}/agreement.csv", f"{CAMPAIGN}/agreement-async.csv"


def off(file):
    return [100 * abs(cell(row, "peak_reserved_difference_share") or 0) for row in rows(file)]


figure("verify.events", AGREEMENT)(lambda: thousands(sum(int(row["events"]) for row in rows(AGREEMENT))))
figure("verify.agreed", AGREEMENT)(lambda: thousands(sum(int(row["events_agreed"]) for row in rows(AGREEMENT))))
figure("verify.cases", AGREEMENT)(lambda: len(rows(AGREEMENT)))
figure("verify.same", AGREEMENT)(lambda: sum(one == 0 for one in off(AGREEMENT)))
figure("verify.off", AGREEMENT)(lambda: at_most(max(off(AGREEMENT)), 2))
figure("async.mean", ASYNC)(lambda: f"{statistics.mean(off(ASYNC)):.2f}")
figure("async.most", ASYNC)(lambda: at_most(max(off(ASYNC)), 2))


# Leaks and thresholds.

LEAKS = f"{CAMPAIGN}/leaks/runs.csv"
SIMULATED_LEAKS = f"{CAMPAIGN}/simulated/leaks.csv"
THRESHOLDS = f"{CAMPAIGN}/oom-thresholds/thresholds.csv"


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


def count_thresholds(confirmed):
    return sum(row["confirmed"] in confirmed for row in rows(THRESHOLDS))


figure("thresholds.cases", THRESHOLDS)(lambda: count_thresholds(("true", "false")))
figure("thresholds.confirmed", THRESHOLDS)(lambda: count_thresholds(("true",)))


@table("thresholds")
def thresholds_table():
    """The thresholds that are not confirmed, by strategy."""
    wrong = [row for row in rows(THRESHOLDS) if row["confirmed"] == "false"]
    body = []
    for name in {row["strategy"]: 0 for row in wrong}:
        mine = [row for row in wrong if row["strategy"] == name]
        low = [row["workload"] for row in mine if row["real_below"] == "completed"]
        high = [row["workload"] for row in mine if row["real_above"] != "completed"]
        body.append([f"`{name}`", len(mine), ", ".join(f"`{one}`" for one in low), ", ".join(f"`{one}`" for one in high)])
    return markdown(["strategy", "cases:", "completes with 2 MiB less", "does not complete with 2 MiB more"], body)


# What techniques save.


def technique(name, model=MODEL):
    return next(row for row in technique_rows() if (row["model"], row["technique"]) == (model, name))


def reduction(row, kind):
    """How much less than the base, in percent."""
    peaks = [cell(one, f"peak_{kind}_bytes") for one in (row, technique("base", row["model"]))]
    return 100 * (1 - peaks[0] / peaks[1])


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


@figure("techniques.per_sample", *TECHNIQUES)
def time_per_sample():
    return f"{2 * cell(technique('half_batch'), 'step_ratio'):.2f}"


@figure("techniques.count", *TECHNIQUES)
def number_of_techniques():
    return len({row["technique"] for row in technique_rows()} - {"base"})


@figure("techniques.memory_off", *TECHNIQUES, STEP_TIMINGS)
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
    for model in MODELS_OF_TECHNIQUES:
        mine = [row for row in technique_rows() if row["model"] == model]
        done = [row for row in mine if row["status"] == "completed"]
        ran_out = sum(row["status"] == "oom" for row in mine)
        names = {row["technique"]: there.get((model, row["technique"])) for row in done}
        timed = [row for row in done if names[row["technique"]] and cell(row, "step_ratio") and cell(names[row["technique"]], "step_ratio")]
        steps = [100 * (cell(names[row["technique"]], "step_ratio") / cell(row, "step_ratio") - 1) for row in timed]
        saving = lambda row: 100 * (cell(row, "allocated_reduction_share") or 0)
        memory = [abs(saving(names[row["technique"]]) - saving(row)) for row in timed]
        shown = [f"{min(steps):+.0f} to {max(steps):+.0f} %", f"{max(memory):.1f} points"] if timed else ["", ""]
        body.append([f"`{model}`", len(mine), len(done), ran_out, len(mine) - len(done) - ran_out, *shown])
    headings = ["model", "rows:", "completed:", "out of memory:", "not possible:", "simulated step ratio:", "simulated saving:"]
    return markdown(headings, body)


CONFIRMED = f"{LATEST}/techniques-24gib/techniques.csv"


def confirmed():
    done = [row for row in rows(CONFIRMED) if row["confirmed_per_second"]]
    return [cell(row, "confirmed_per_second") / cell(row, "confirmed_simulated_per_second") for row in done]


figure("confirmed.count", CONFIRMED)(lambda: len(confirmed()) - 1)
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


# Frees after kernels.

EMPTY_CACHE = f"{LATEST}/empty-cache.jsonl"
MIB = 1 << 20


def experiments(what):
    return [row for row in map(json.loads, text(EMPTY_CACHE).splitlines()) if row["what"] == what]


def frees():
    return [row["free_us"] for row in experiments("overlap") if row["mib"] == 64]


def slower_first():
    return [100 * (row["first_us"] / row["second_us"] - 1) for row in experiments("touch")]


@figure("free.profile", PROFILE)
def free_in_profile():
    costs = {cost["bytes"]: cost["median_us"] for cost in tomllib.loads(text(PROFILE))["cost"] if cost["call"] == "cuMemFree"}
    below, above = costs[20 * MIB], costs[128 * MIB]
    return round(below + (above - below) * (64 - 20) / (128 - 20))


figure("free.low", EMPTY_CACHE)(lambda: round(min(frees())))
figure("free.high", EMPTY_CACHE)(lambda: round(max(frees())))
figure("touch.low", EMPTY_CACHE)(lambda: round(min(slower_first())))
figure("touch.high", EMPTY_CACHE)(lambda: round(max(slower_first())))


# Copies while memory is cleared.

CLEARING = f"{LATEST}/clearing.jsonl"


def copied_after(operation, gib, by="free", pause=0):
    """The median time of an operation after that much memory was given back."""
    wanted = {"operation": operation, "given_back_gib": gib, "by": by, "pause": pause}
    found = [row["took"] for row in map(json.loads, text(CLEARING).splitlines()) if wanted.items() <= row.items()]
    return statistics.median(found[0])


figure("clearing.rest", CLEARING)(lambda: f"{copied_after('pageable_in', 0):.1f}")
figure("clearing.six", CLEARING)(lambda: f"{copied_after('pageable_in', 6):.1f}")
figure("clearing.most", CLEARING)(lambda: f"{copied_after('pageable_in', 24):.1f}")
figure("clearing.released", CLEARING)(lambda: f"{copied_after('pageable_in', 24, 'unmap'):.1f}")
figure("clearing.pinned_rest", CLEARING)(lambda: f"{copied_after('pinned_in', 0):.2f}")
figure("clearing.pinned_six", CLEARING)(lambda: f"{copied_after('pinned_in', 6):.2f}")


# Suites that are measured in parts.

FRAGMENTED = f"{CAMPAIGN}/fragmentation"
figure("fragmentation.cases", f"{FRAGMENTED}/runs.csv")(lambda: len(rows(f"{FRAGMENTED}/runs.csv")))
figure("fragmentation.planned", f"{FRAGMENTED}/plan.csv")(lambda: len(rows(f"{FRAGMENTED}/plan.csv")))
figure("throughput.cases", f"{CAMPAIGN}/throughput/runs.csv")(lambda: len(rows(f"{CAMPAIGN}/throughput/runs.csv")))


# Claims.

CLAIMS = f"{CAMPAIGN}/claims"


def claims(verdict=None):
    return sum(verdict in (None, row["verdict"]) for row in rows(f"{CLAIMS}/claims.csv"))


figure("claims.count", f"{CLAIMS}/claims.csv")(claims)
for verdict in ("confirmed", "depends", "refuted", "not_measurable"):
    figure(f"claims.{verdict}", f"{CLAIMS}/claims.csv")(functools.partial(claims, verdict))


# Correctness.

PROMISES = f"{LATEST}/promises.txt"
CONFORMANCE = f"{LATEST}/conformance.txt"
BEHAVIOUR = f"{LATEST}/behaviour.txt"
TRAINING = "results/training/training.txt"
STRESSED = {name: f"{CAMPAIGN}/{name}.txt" for name in ("integrity-large", "integrity-small", "soak")}


def stressed(name, word):
    """A number before a word of the last line, such as `8831291 blocks`."""
    return int(re.search(rf"(\d+) {word}", text(STRESSED[name])).group(1))


for name, file in STRESSED.items():
    for word in ("blocks", "damaged"):
        figure(f"stress.{name}.{word}", file)(lambda name=name, word=word: thousands(stressed(name, word)))


def verified(name):
    """GiB that were compared."""
    return float(re.search(r"and ([\d.]+) GiB verified", text(STRESSED[name])).group(1))


figure("stress.millions", *STRESSED.values())(
    lambda: f"{(stressed('integrity-large', 'blocks') + stressed('integrity-small', 'blocks')) / 1e6:.1f}"
)
figure("stress.tebibytes", *STRESSED.values())(lambda: f"{(verified('integrity-large') + verified('integrity-small')) / 1024:.1f}")
for size in ("small", "large"):
    figure(f"stress.{size}", STRESSED[f"integrity-{size}"])(lambda size=size: len(re.findall(r" passed ", text(STRESSED[f"integrity-{size}"]))))
figure("stress.damage", *STRESSED.values())(lambda: stressed("integrity-large", "damaged") + stressed("integrity-small", "damaged"))


def fault_trials():
    return [int(trials) for trials in re.findall(r"(?:direct|caching|oomph) +(?:passed|failed) +(\d+)", text(PROMISES))]


figure("promises.faults", PROMISES)(lambda: thousands(sum(fault_trials())))
figure("promises.failures", PROMISES)(lambda: len(re.findall(r"^failed: ", text(PROMISES), re.M)))
figure("conformance.count", CONFORMANCE)(lambda: len(re.findall(r": 0 findings$", text(CONFORMANCE), re.M)))


def failing_driver(word):
    return [int(number) for number in re.findall(rf"'{word}': (\d+)", text(BEHAVIOUR))]


figure("behaviour.processes", BEHAVIOUR)(lambda: len(failing_driver("trainings")))
for word in ("trainings", "steps", "failed"):
    figure(f"behaviour.{word}", BEHAVIOUR)(lambda word=word: thousands(sum(failing_driver(word))))


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


RUNS_UNDER_ALLOCATORS = f"{LATEST}/allocator.jsonl"
PROGRAMS_UNDER_ALLOCATORS = {
    "swiglu_var": "transformer, lengths and batches vary",
    "unet": "convolutional net, resolutions vary",
    "moe": "mixture of experts",
    "serving": "server, growing caches",
    "prefetch": "batches copied on a side stream",
    "fsdp": "FSDP2, one rank",
    "fsdp1": "FSDP1, one rank",
    "generation": "generation, caches grow by `torch.cat`",
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


def compared_allocators():
    """Of each program: reserved over allocated under the three allocators, and the interval of the ratio of the same step."""
    for cells in rows_of_compare("summary", RUNS_UNDER_ALLOCATORS).values():
        yield [float(cell) for cell in cells[:3]], [float(end) for end in re.findall(r"[(]([\d.]+) to ([\d.]+)[)]", cells[6])[0]]


figure("compare.programs", RUNS_UNDER_ALLOCATORS)(lambda: len(list(compared_allocators())))
figure("compare.memory", RUNS_UNDER_ALLOCATORS)(lambda: sum(ours <= expandable for (_, expandable, ours), _ in compared_allocators()))
figure("compare.median", RUNS_UNDER_ALLOCATORS)(lambda: f"{statistics.median(over[2] for over, _ in compared_allocators()):.3f}")
figure("compare.steps", RUNS_UNDER_ALLOCATORS)(lambda: sum(low <= 1 <= high or high < 1.02 for _, (low, high) in compared_allocators()))


TRIAL = f"{LATEST}/trial.csv"


def trial_ratios(ours, others):
    """Of each program of the trial, the quotient of two columns."""
    return [int(row[f"{ours}_bytes"]) / int(row[f"{others}_bytes"]) for row in rows(TRIAL)]


def trial_seconds(allocator):
    return f"{sum(int(row[f'{allocator}_driver_ns']) for row in rows(TRIAL)) / 1e9:.1f}"


figure("trial.programs", TRIAL)(lambda: len(rows(TRIAL)))
figure("trial.above", TRIAL)(lambda: sum(ratio > 1 for ratio in trial_ratios("oomph_reserved", "expandable_reserved")))
for name, ours in (("", "oomph_reserved"), ("before_", "oomph_before_reserved")):
    ratios = functools.partial(trial_ratios, ours, "expandable_reserved")
    figure(f"trial.{name}below", TRIAL)(lambda ratios=ratios: sum(ratio <= 1 for ratio in ratios()))
    figure(f"trial.{name}worst", TRIAL)(lambda ratios=ratios: f"{100 * (max(ratios()) - 1):.2f}")
for name in ("oomph", "expandable"):
    figure(f"trial.mean_{name}", TRIAL)(lambda name=name: f"{statistics.geometric_mean(trial_ratios(f'{name}_reserved', 'allocated')):.3f}")
    figure(f"trial.driver_{name}", TRIAL)(lambda name=name: trial_seconds(name))


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
    found = re.findall(r"^ (\S+) .*?(?:GiB|MiB) +(\d+\.\d{3})(?: |$)", text(f"{CAMPAIGN}/adversary.txt"), re.M)
    return markdown(["strategy", "memory needed / live:"], [[f"`{strategy}`", needed] for strategy, needed in found])


# Speed.

PEERS = f"{CAMPAIGN}/peers-pairs.csv"
PEERS_IN_THREADS = f"{CAMPAIGN}/peers-threads.csv"
PEERS_AGAIN = f"{LATEST}/peers-threads.csv"


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
for name, file, all_settings in (("threads", PEERS_IN_THREADS, ["native"]), ("threads_again", PEERS_AGAIN, ["native", "expandable"])):
    figure(f"peers.turns.{name}", file)(lambda file=file: len(speed_up(file, "native", "16 threads")))
    for settings in all_settings:
        for end, suffix in enumerate(("low", "high")):

            @figure(f"peers.{name}.{settings}.{suffix}", file)
            def threads_range(file=file, settings=settings, end=end):
                cases = {row["case"] for row in rows(file)}
                return shortest_and_longest(statistics.median(speed_up(file, settings, case)) for case in cases)[end]


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

LEAK, RECORD = (f"results/out-of-memory/{name}.txt" for name in ("leak", "record"))


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
figure("oom.further", RECORD)(lambda: f"{allocated_at_oom()[1] - allocated_at_oom()[0]:.1f}")


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
        "`oomph` has changed since: need {changed.need}, appetite {changed.appetite}",
        "and a trial of {trial.programs} other programs](results/2026-11-19-h200/README.md), where {trial.above} need up to {trial.worst} % more",
        "18 strategies, {catalog.workloads} workloads, benchmark suites",
        "{need.strategies} strategies on {need.sources} workloads and recordings, {strategies.cases} cases. By content they are"
        " {need.patterns} patterns, and by program {need.families}, each counted once; {need.test} of the programs were not seen when",
        "to the byte in {agree.same} of the {agree.compared} cases that are neither `async` nor `arena`",
        "{steps.within} of {steps.count} step times of techniques are within 10 % of the GPU's",
        "what `pool` does on {rmm.same} of the {rmm.traces} recordings",
        "([{techniques.count} techniques, 163M to 13B and ResNet-50]",
        "the same samples take {techniques.per_sample} times as long",
        "differ by at most {techniques.memory_off} points",
        "Of {claims.count} published claims about GPU memory {claims.confirmed} are confirmed there, {claims.refuted} refuted,"
        " {claims.depends} depend on the case, and {claims.not_measurable} cannot be measured",
        "the median of {peers.turns} turns",
        "{stress.millions} million blocks and {stress.tebibytes} TiB were filled and verified on that GPU, small blocks under"
        " {stress.small} strategies and large ones under {stress.large}, from 16 threads on 8 streams, with {stress.damage} damaged bytes",
        "All {conformance.count} strategies and variants pass conformance",
    ],
    "docs/allocators.md": [
        "At least {releases.programs} programs for each release from 2.0 to 2.15 gave {releases.differences} differences",
        "to the byte in {agree.same} of the {agree.compared} cases that are neither `async` nor `arena`. [The other {agree.others}]",
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
    f"{LATEST}/README.md": [
        "at random, in {behaviour.processes} processes",
        "need {changed.need} and appetite {changed.appetite}",
        "to the byte in {changed.same} of {changed.cases} cases, and simulated driver time is {changed.time} times the GPU's in the median and within"
        " a factor of 2 in {changed.near} %",
        "[trial.csv](trial.csv): {trial.programs} programs that",
        "Reserved memory under `oomph` is at or below that under expandable segments in {trial.below} of {trial.programs}, and at most {trial.worst} %"
        " above it in the others. Its geometric mean over what is allocated is {trial.mean_oomph} (expandable segments: {trial.mean_expandable}).",
        "it was at or below in {trial.before_below} of them, and at most {trial.before_worst} % above",
        "Driver time under `oomph` is {trial.driver_oomph} s in all, under expandable segments {trial.driver_expandable} s.",
        "at or below that under expandable segments in {compare.memory} of {compare.programs} programs, and {compare.median} times"
        " what is allocated in the median",
        "contains 1.00 or ends below 1.02 in {compare.steps} of {compare.programs} programs",
        "{behaviour.trainings} trainings with {behaviour.steps} steps; {behaviour.failed} attempts failed and were repeated",
        "all {conformance.count} strategies and variants",
        "{promises.faults} runs of three strategies, nearly all with a failing call; {promises.failures} reported as a failure",
        "as our `pool` on {rmm.same} of {rmm.traces} recordings",
        "with the base and {confirmed.count} techniques of 406M, at {confirmed.low} to {confirmed.high} %",
        "`cuMemFree` of 64 MiB takes {free.low} to {free.high} us",
        "says {free.profile} us",
        "takes {touch.low} to {touch.high} % longer than the second",
        "from pageable memory takes {clearing.rest} ms at rest, {clearing.six} ms after 6 GiB were given back and {clearing.most} ms after 24 GiB; one from"
        " pinned memory takes {clearing.pinned_rest} and {clearing.pinned_six} ms",
        "gives memory back in the same way: {clearing.released} ms after 24 GiB",
        "in {peers.turns.threads_again} turns: {peers.threads_again.native.low} to {peers.threads_again.native.high} times PyTorch's speed with native"
        " settings, {peers.threads_again.expandable.low} to {peers.threads_again.expandable.high} times with expandable segments",
    ],
    f"{PYTHON}/README.md": [
        "every decision is the same: {verify.agreed} of {verify.events} events",
        "the same to the byte in {verify.same} of {verify.cases} cases and at most {verify.off} % off",
        "peak reserved is {async.mean} % off on average and {async.most} % at most",
        "{thresholds.confirmed} of {thresholds.cases} are confirmed",
        "of {claims.count}, {claims.confirmed} are confirmed, {claims.depends} depend, {claims.refuted} are refuted,"
        " {claims.not_measurable} cannot be measured here",
        "{stress.integrity-large.blocks} large and {stress.integrity-small.blocks} small blocks verified,"
        " {stress.integrity-large.damaged} and {stress.integrity-small.damaged} damaged",
        "{stress.soak.blocks} blocks, {stress.soak.damaged} damaged",
        "{fragmentation.cases} of {fragmentation.planned} planned cases",
        "the {arena.gib} GiB of `arena` took {arena.ms} ms; in processes of their own, from which the profile has its costs, {arena.profile} ms",
        "all {throughput.cases} cases",
        "in {peers.turns.threads} turns: {peers.threads.native.low} to {peers.threads.native.high} times PyTorch's",
        "to the byte in {agree.same} of the {agree.compared} cases that are neither `async` nor `arena`",
        "equals the simulated one in {leaks.same} of {leaks.cases} cases",
        "Of {steps.count} step times of techniques {steps.within} are within 10 % of the GPU's, all between {steps.low} and {steps.high} of it",
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
    f"{LATEST}/README.md": [("# The allocator", None)],
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
        (r"GPT of 406M|GPT of 124M|163M to 13B|ResNet-50|from 16 threads on 8|commit 830ca09", "names of models, what was asked for, and a commit"),
        (r"95 % intervals|within 10 %", "which interval, and which bar"),
    ],
    f"{PYTHON}/README.md": [
        (r"12 layers, 1,024 wide|three steps|four servers|T5", "what was run"),
        (r"0\.1\.0|3\.12", "versions"),
        (r"within 10 %", "the bar"),
        (r"2 MiB (more|less)", "the distance of the confirming runs"),
        (r"4 GiB of live blocks from 2 MiB", "what was asked for"),
        (r"may take 90 %", "the default limit of the program"),
    ],
    f"{LATEST}/README.md": [
        (r"1 in 20|178 s in 14|95 s in 12|61 minutes in all|6 GiB|24 GiB|of 38 MiB|of 64 MiB|All 14 checks|two turns|one of `prefetch`|20 and 128 MiB|of 406M", "what was asked for, and the sum"),
        (r"1\.00 or ends below 1\.02|five turns|four of `fsdp`|last seven programs|two CPU cores|a factor of 2|95 % interval|first three steps|at least 30 steps|did 10 to 20", "the bar, and how it was measured"),
        (r"4 calls for events", "rules of the allocator"),
    ],
    "docs/allocators.md": [(r"to 90 %", "the default limit of the program")],
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
    for row in rows(f"{CLAIMS}/claims.csv"):
        name = {"not_measurable": "not measurable here"}.get(row["verdict"], row["verdict"])
        line = next((line for line in text(f"{CLAIMS}/claims.md").splitlines() if f"**{row['id']}**:" in line), "")
        if f" {name} " not in line:
            problems.append(f"{CLAIMS}/claims.md: {row['id']} is not {name}")
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
