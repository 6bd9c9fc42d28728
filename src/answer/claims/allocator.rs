//! Claims about allocators: fragmentation, counters, `del`, `gc.collect()` and `empty_cache()`.

use std::{collections::BTreeMap, ops::RangeInclusive};

use super::{
    ARTICLES, Claim,
    ClaimTest::{AnyDevice, NotMeasurable, SimulatedOnly},
    bench::{
        CACHED_PAIR_NS, CACHING, ClaimBench, ClaimResult, DEL_LEAVES_IT_ALLOCATED, DIES_WITH_MORE_THAN_ITS_BLOCKS,
        DRIVER_PAIR_NS, EXPANDABLE, MODEL, VARIABLE_LENGTH_ALLOCATED, VARIABLE_LENGTH_RESERVED, gpt_355m, model,
        recipe,
    },
    finding::{
        ClaimAmount::{Count, Percent, Size, Time},
        Measured, ratio, reduction,
    },
};
use crate::{answer::leaks, base::GIB, measure::Status, models::Recipe, replay::OomCause};

pub(super) const CLAIMS: &[Claim] = &[
    Claim {
        id: "frag-oom",
        source: ARTICLES,
        statement: "A model that should fit in 11.8 GB fails on a 12 GB device, because no contiguous block is left",
        published: "OOM with free memory present",
        lesson: "It happens where shapes change from step to step and almost no memory is spare: then to most allocators, also to \
                 those that map pages. With a tenth to spare it depends on the shapes.",
        command: "oomph replay variable-length --set batch=8 --set context=1144 --limit 11.37GB --strategy caching --strategy caching:expandable_segments:True",
        test: AnyDevice(|bench, finding| {
            let (should_fit, card) = (11_800_000_000, 12_000_000_000);
            let (room, limit) = (bench.available_on(should_fit)?, Some(bench.available_on(card)?));
            // One draw of lengths proves nothing: which of them tear memory is chance.
            let programs = SEEDS.map(|seed| just_fitting(bench, seed, room)).collect::<ClaimResult<Vec<_>>>()?;
            let of_seeds = format!("of {} draws", programs.len());
            for strategy in STRATEGIES {
                let mut causes = Vec::new();
                for (program, _) in &programs {
                    causes.extend(bench.replayed(program, strategy, limit)?.0.oom_cause);
                }
                let fragmented = causes.iter().filter(|cause| **cause == OomCause::Fragmentation).count();
                let name = format!("{strategy}, {of_seeds} fail with enough free");
                finding.figure(name, Count(fragmented as u64));
                if causes.len() > fragmented {
                    let exhausted = Count((causes.len() - fragmented) as u64);
                    finding.figure(format!("{strategy}, fail with too little free"), exhausted);
                }
                if strategy == CACHING {
                    let holds = (2 * fragmented > programs.len(), DIES_WITH_MORE_THAN_ITS_BLOCKS);
                    finding.check("caching fails in most draws with enough free", holds);
                }
            }
            let mut roomy = 0;
            for (_, shorter) in &programs {
                roomy += u64::from(bench.replayed(shorter, CACHING, limit)?.0.status == Status::Oom);
            }
            finding.figure(format!("caching with sequences of 1024 tokens at most, {of_seeds} fail"), Count(roomy));
            Ok(())
        }),
    },
    Claim {
        id: "pool-overhead",
        source: "RMM documentation and articles: a pool makes small allocations cheaper",
        statement: "A pool of one's own cuts the overhead of small requests",
        published: "less time per small allocation",
        lesson: "The driver needs tens of microseconds for a pair if it has to map a page, and two if a page is mapped already. A cache calls it once.",
        command: "oomph replay hot-512 --set pairs=2000 --strategy direct --strategy caching --strategy async",
        test: AnyDevice(|bench, finding| {
            let pairs = 2000;
            let program = recipe("hot-512", &[("pairs", "2000")])?;
            let time = |strategy: &str| {
                let record = bench.replayed(&program, strategy, None)?.0;
                ClaimResult::Ok(record.driver_ns.unwrap_or(0) / pairs)
            };
            let (direct, caching) = (time("direct")?, time(CACHING)?);
            finding.figure("driver time of a pair, direct", (Time(direct), Time(DRIVER_PAIR_NS)));
            finding.figure("caching (PyTorch: its own time included)", (Time(caching), Time(CACHED_PAIR_NS)));
            finding.figure("async, the driver's own pool", Time(time("async")?));
            finding.check("caching takes less time than direct", caching < direct);
            Ok(())
        }),
    },
    Claim {
        id: "track-allocated",
        source: ARTICLES,
        statement: "Peak usage is best tracked with max_memory_allocated",
        published: "max_memory_allocated",
        lesson: "Reserved memory and the context decide whether a program fits: max_memory_reserved is what has to fit.",
        command: "oomph replay variable-length --strategy caching --limit 5.88GiB",
        test: AnyDevice(|bench, finding| {
            let program = recipe("variable-length", &[])?;
            let whole = bench.memory(&program)?;
            let (allocated, reserved) =
                (whole.peak_allocated_bytes.unwrap_or(0), whole.peak_reserved_bytes.unwrap_or(0));
            finding.figure("peak allocated", Size(allocated));
            finding.figure("peak reserved", Size(reserved));
            let suffices =
                |limit| ClaimResult::Ok(bench.replayed(&program, CACHING, Some(limit))?.0.status == Status::Completed);
            let page = 2 << 20;
            let (by_allocated, by_reserved) = (suffices(allocated.next_multiple_of(page))?, suffices(reserved)?);
            finding.figure("memory of the allocated peak suffices (1: yes)", Count(by_allocated.into()));
            finding.figure("memory of the reserved peak suffices (1: yes)", Count(by_reserved.into()));
            finding.check("as much memory as max_memory_allocated suffices", by_allocated);
            let recording = "recording varlen (other lengths)";
            finding.pytorch_figure(format!("{recording}, peak allocated"), Size(VARIABLE_LENGTH_ALLOCATED));
            finding.pytorch_figure(format!("{recording}, peak reserved"), Size(VARIABLE_LENGTH_RESERVED));
            let completes = !DIES_WITH_MORE_THAN_ITS_BLOCKS;
            finding.pytorch_check(format!("{recording} completes in 7,055 MB, more than it allocates"), completes);
            Ok(())
        }),
    },
    Claim {
        id: "frag-word",
        source: ARTICLES,
        statement: "Memory that stays allocated is fragmentation",
        published: "a use of the word",
        lesson: "Fragmentation is free memory that cannot be used. Memory that stays allocated has a \
                 holder; it is a leak if it is no longer needed.",
        command: "oomph leaks leak-outputs-detached",
        test: AnyDevice(|bench, finding| {
            let program = recipe("leak-outputs-detached", &[("steps", "24")])?;
            let (observed, _) = bench.growth(&program, CACHING, None)?;
            let (first, last) = (observed.judged().first(), observed.judged().last());
            let grown = |of: fn(&leaks::StepUse) -> u64| {
                first.zip(last).map_or(0, |(first, last)| of(last).saturating_sub(of(first)))
            };
            let (allocated, stuck) = (grown(|step| step.allocated_bytes), grown(|step| step.stuck_bytes.unwrap_or(0)));
            finding.figure("allocated grows by", Size(allocated));
            finding.figure("free memory that cannot be given back grows by", Size(stuck));
            finding.check("free memory that cannot be used grows half as much at least", 2 * stuck >= allocated);
            Ok(())
        }),
    },
    Claim {
        id: "fraction",
        source: "articles, on torch.cuda.set_per_process_memory_fraction",
        statement: "Capping the process to a fraction (0.6) of a GPU mimics a smaller GPU",
        published: "the same OOM",
        lesson: "The fraction counts what the allocator takes. A smaller card also holds the context and the libraries, so \
                 memory runs out earlier: subtract them from the fraction.",
        command: "oomph leaks leak-cache --set steps=200 --card 20GiB --limit 0.6; oomph leaks leak-cache --set steps=200 --card 12GiB",
        test: SimulatedOnly(|bench, finding| {
            let program = recipe("leak-cache", &[("steps", "200")])?;
            let ends_at = |device: &str, limit: Option<u64>| {
                let record = bench.replayed_on(&device.parse()?, &program, CACHING, limit)?.0;
                ClaimResult::Ok(u64::from(record.oom_step.unwrap_or(u32::MAX)))
            };
            let of_fraction = ends_at("sim:20GiB", Some(12 * GIB))?;
            let of_card = ends_at("sim:12GiB", None)?;
            let room = bench.available_on(12 * GIB)?;
            let of_corrected = ends_at("sim:20GiB", Some(room))?;
            finding.figure("0.6 of 20 GiB ends in step", Count(of_fraction));
            finding.figure("a card of 12 GiB ends in step", Count(of_card));
            finding.figure("0.6 less context and libraries ends in step", Count(of_corrected));
            finding.figure("which take", Size(bench.overhead()?));
            finding.check("both end in the same step", of_fraction == of_card);
            finding
                .check("both end in the same step once context and libraries are taken off", of_corrected == of_card);
            Ok(())
        }),
    },
    Claim {
        id: "smi-below",
        source: ARTICLES,
        statement: "nvidia-smi shows less than memory_allocated at times",
        published: "less",
        lesson: "Allocated memory is part of reserved memory, and reserved memory is part of what the device holds: nvidia-smi shows \
                 all of it and the context. Examples alone cannot refute that it happens; the rule does, for one process on one GPU.",
        command: "oomph replay variable-length --strategy caching --format json",
        test: AnyDevice(|bench, finding| {
            let (mut cases, mut below, mut least) = (0, 0, u64::MAX);
            for name in ["variable-length", "leak-outputs", "dangling-del-empty-cache", "phase-change", "streams"] {
                for strategy in [CACHING, EXPANDABLE, "caching:max_split_size_mb:64", "async"] {
                    let detail = bench.replayed(&recipe(name, &[])?, strategy, None)?.1;
                    let points = detail.timeline.points.iter();
                    let used =
                        || points.clone().filter_map(|point| Some((point.device_used_bytes?, point.allocated_bytes)));
                    // Within a stretch the extremes may lie apart: only what is certain counts.
                    below += u64::from(used().any(|(used, allocated)| used.max < allocated.min));
                    let differences = used().map(|(used, allocated)| used.min.saturating_sub(allocated.min));
                    least = differences.fold(least, u64::min);
                    cases += 1;
                }
            }
            finding.figure("cases", Count(cases));
            finding.figure("of which show less at some time", Count(below));
            finding.figure("least difference of all cases", Size(least));
            finding.check("in at least one case the device holds less than is allocated", below > 0);
            Ok(())
        }),
    },
    Claim {
        id: "restart",
        source: ARTICLES,
        statement: "Memory that is not reclaimed after a restart means a leak",
        published: "a leak",
        lesson: "a simulated device ends with its process: the end of a process is not simulated",
        command: "oomph replay training --set steps=100000 --device cuda --strategy caching, ended by force; then nvidia-smi",
        test: NotMeasurable,
    },
    Claim {
        id: "too-large",
        source: ARTICLES,
        statement: "A model that is too large for the device ends in a kernel launch failure",
        published: "kernel launch failure",
        lesson: "It ends with an OOM while weights are copied to the device, before any kernel runs.",
        command: "oomph replay load-beyond-capacity --strategy caching",
        test: AnyDevice(|bench, finding| {
            let record = bench.memory(&recipe("load-beyond-capacity", &[])?)?;
            finding.figure("allocated when memory ran out", Size(record.peak_allocated_bytes.unwrap_or(0)));
            finding.figure("bytes asked for", Size(record.oom_requested_bytes.unwrap_or(0)));
            let in_loading = record.status == Status::Oom && record.oom_step.is_none();
            finding.check("loading gets through, and a later kernel fails", !in_loading);
            Ok(())
        }),
    },
    Claim {
        id: "empty-cache",
        source: "PyTorch forum, thread 175356: it slows iterations; the figure has no known first source",
        statement: "empty_cache in every step slows training by 5-15 %",
        published: "5-15 %",
        lesson: "It costs some dozens of driver calls per step, which is little beside a long step and much beside a short one; it \
                 lowers reserved memory between steps and never the peak of what is allocated.",
        command: "oomph techniques --model reference-gpt-406m --technique empty_cache",
        test: AnyDevice(|bench, finding| {
            let base = bench.step(&model(MODEL, "")?)?;
            let plain = bench.memory(&model(MODEL, "")?)?;
            for (name, techniques) in [
                ("after forward", "empty_cache:forward"),
                ("after backward", "empty_cache:backward"),
                ("after each step", "empty_cache"),
                ("after every third step", "empty_cache:3"),
                ("at phase changes", "empty_cache:phase"),
            ] {
                let program = model(MODEL, techniques)?;
                if let Some((base, step)) = base.zip(bench.step(&program)?) {
                    let pytorch = gpt_355m::EMPTY_CACHE.step_ms / gpt_355m::BASE.step_ms;
                    let pytorch = (techniques == "empty_cache").then_some(pytorch);
                    let slower = Measured { here: ratio(base.0, step.0).here, pytorch };
                    let slower = slower.map(|ratio| 100.0 * (ratio - 1.0));
                    finding.figure(format!("{name}, slower by"), slower.map(Percent));
                    if pytorch.is_some() {
                        finding.check_range("after each step it is slower by", slower, 5.0..=15.0, " %");
                        finding.check("it is slower at all", slower.map(|percent| percent > 0.1));
                    }
                }
                let record = bench.memory(&program)?;
                let more_calls = record.driver_calls.unwrap_or(0).saturating_sub(plain.driver_calls.unwrap_or(0));
                finding.figure(format!("{name}, driver calls more in three steps"), Count(more_calls));
                let saved = reduction(plain.peak_reserved_bytes.unwrap_or(0), record.peak_reserved_bytes.unwrap_or(0));
                finding.figure(format!("{name}, peak reserved lower by"), saved.map(Percent));
            }
            Ok(())
        }),
    },
    Claim {
        id: "empty-cache-oom",
        source: ARTICLES,
        statement: "Calling empty_cache before the next phase prevents an OOM",
        published: "prevents OOM",
        lesson: "The allocator frees its cache and tries again before it fails, so that steady shapes gain nothing; where shapes \
                 change, a cache that starts empty is a little less fragmented.",
        command: "oomph threshold phase-change --strategy caching; oomph threshold phase-change --set techniques=empty_cache:phase --strategy caching",
        test: SimulatedOnly(|bench, finding| {
            for name in ["phase-change", "variable-length"] {
                let needed =
                    |techniques: &str| bench.smallest_memory(&recipe(name, &[("techniques", techniques)])?, CACHING);
                let (Some(without), Some(with)) = (needed("")?, needed("empty_cache:phase")?) else { continue };
                finding.figure(format!("{name}, smallest memory without"), Size(without));
                finding.figure(format!("{name}, with"), Size(with));
                finding.check(format!("{name} needs at least 1 % less with it"), reduction(without, with).here >= 1.0);
            }
            Ok(())
        }),
    },
    Claim {
        id: "dangling",
        source: "PyTorch documentation, FAQ on memory that is not freed, and articles",
        statement: "`del` alone does not give memory back; gc.collect and empty_cache do",
        published: "del, gc.collect and empty_cache together",
        lesson: "`del` of the last name frees a tensor at once for PyTorch's own use. gc only finds what refers to itself, \
                 empty_cache only hands cached memory back to the driver, where nvidia-smi and other processes see it.",
        command: "oomph replay dangling-del --strategy caching (and dangling-gc, dangling-empty-cache, ... : all eight)",
        test: AnyDevice(|bench, finding| {
            let mut levels = BTreeMap::new();
            for remedy in [
                "none",
                "del",
                "gc",
                "empty_cache",
                "del_gc",
                "del_empty_cache",
                "gc_empty_cache",
                "del_gc_empty_cache",
            ] {
                let (observed, _) = bench.growth(&recipe("dangling", &[("remedy", remedy)])?, CACHING, None)?;
                let last = observed.steps.last().copied().unwrap_or_default();
                finding.figure(format!("{remedy}, allocated"), Size(last.allocated_bytes));
                finding.figure(format!("{remedy}, reserved"), Size(last.reserved_bytes));
                levels.insert(remedy, last);
            }
            let lowers = |remedy: &str, level: fn(&leaks::StepUse) -> u64| {
                reduction(level(&levels["none"]), level(&levels[remedy])).here >= 1.0
            };
            let (allocated, reserved) =
                (|step: &leaks::StepUse| step.allocated_bytes, |step: &leaks::StepUse| step.reserved_bytes);
            finding
                .check("after `del` alone as much is allocated", (!lowers("del", allocated), DEL_LEAVES_IT_ALLOCATED));
            finding.check("after `del` alone as much is reserved", !lowers("del", reserved));
            let names_stay = lowers("gc_empty_cache", allocated);
            finding.check("gc.collect and empty_cache without `del` lower what is allocated", names_stay);
            finding.check("all three lower what is reserved", lowers("del_gc_empty_cache", reserved));
            Ok(())
        }),
    },
];

/// Draws of sequence lengths.
const SEEDS: RangeInclusive<u64> = 1..=6;

/// Training on random lengths: with the longest context whose live bytes at the peak fit in `room`, and with 1024 tokens.
fn just_fitting(bench: &ClaimBench<'_>, seed: u64, room: u64) -> ClaimResult<(Recipe, Recipe)> {
    let of_length = |context: u64| {
        let set = [("batch", "8"), ("context", &context.to_string())];
        ClaimResult::Ok(recipe("variable-length", &set)?.seed(seed))
    };
    let needed = |program: &Recipe| ClaimResult::Ok(bench.memory(program)?.peak_requested_bytes.unwrap_or(0));
    let shorter = of_length(1024)?;
    // Memory grows a little less than the length: from above, down to the first that fits.
    let mut context = (1024.0 * room as f64 / needed(&shorter)? as f64 * 1.1) as u64 / 8 * 8;
    while context > 1024 && needed(&of_length(context)?)? > room {
        context -= 8;
    }
    Ok((of_length(context)?, shorter))
}

/// Allocators of every family.
const STRATEGIES: [&str; 10] =
    ["direct", CACHING, EXPANDABLE, "caching:max_split_size_mb:64", "async", "pool", "arena", "bfc", "tlsf", "stitch"];
