//! Claims about allocators, fragmentation, and what the counters mean.

use std::ops::RangeInclusive;

use super::{
    Claim, Group,
    bench::{Bench, CACHING, ClaimResult, EXPANDABLE, recipe},
    finding::{Amount, Finding},
    pytorch::{
        CACHED_PAIR_NS, DIES_WITH_MORE_THAN_ITS_BLOCKS, DRIVER_PAIR_NS, VARIABLE_LENGTH_ALLOCATED,
        VARIABLE_LENGTH_RESERVED,
    },
};
use crate::{answer::leaks, base::GIB, measure::Status, models::Recipe, replay::OomCause};

pub(super) const CLAIMS: &[Claim] = &[
    Claim {
        id: "frag-oom",
        group: Group::Allocator,
        statement: "A model that should fit in 11.8 GB fails on a 12 GB device, because no contiguous block is left",
        published: "OOM with free memory present",
        lesson: "It happens where shapes change from step to step and next to nothing is to spare: then to most allocators, those \
                 that map pages among them. With a tenth to spare it is a matter of luck.",
        command: "oomph replay variable-length --set batch=8 --set context=1144 --limit 11.37GB --strategy caching --strategy caching:expandable_segments:True",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let (should_fit, card) = (11_800_000_000, 12_000_000_000);
            let (room, limit) = (bench.room_in(should_fit)?, bench.room_in(card)?);
            // One draw of lengths proves nothing: which of them tear memory is chance.
            let mut torn = [0; STRATEGIES.len()];
            let mut exhausted = [0; STRATEGIES.len()];
            let mut roomy = 0;
            for seed in SEEDS {
                let (program, shorter) = just_fitting(bench, seed, room)?;
                for (place, strategy) in STRATEGIES.into_iter().enumerate() {
                    match bench.replayed(&program, strategy, Some(limit))?.0.oom_cause {
                        Some(OomCause::Fragmentation) => torn[place] += 1,
                        Some(OomCause::Exhaustion) => exhausted[place] += 1,
                        None => {}
                    }
                }
                roomy += u64::from(bench.replayed(&shorter, CACHING, Some(limit))?.0.status == Status::Oom);
            }
            let of_seeds = format!("of {} draws", SEEDS.end());
            for (place, strategy) in STRATEGIES.into_iter().enumerate() {
                let name = format!("{strategy}, {of_seeds} fail with enough free");
                finding.figure(name, Amount::Count(torn[place]));
                if exhausted[place] > 0 {
                    finding.figure(format!("{strategy}, fail with too little free"), Amount::Count(exhausted[place]));
                }
            }
            finding.figure(
                format!("caching with sequences of 1024 tokens at most, {of_seeds} fail"),
                Amount::Count(roomy),
            );
            let by_caching = STRATEGIES.into_iter().position(|name| name == CACHING).map_or(0, |place| torn[place]);
            let most = 2 * by_caching > *SEEDS.end();
            finding.check_beside("caching fails in most draws with enough free", most, DIES_WITH_MORE_THAN_ITS_BLOCKS);
            Ok(finding)
        },
    },
    Claim {
        id: "pool-overhead",
        group: Group::Allocator,
        statement: "A pool of one's own cuts the overhead of small requests",
        published: "less time per small allocation",
        lesson: "The driver takes tens of microseconds for a pair where it has to map a page, two where one is there already; a cache asks it once.",
        command: "oomph replay hot-512 --set pairs=2000 --strategy direct --strategy caching --strategy async",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let pairs = 2000;
            let program = recipe("hot-512", &[("pairs", "2000")])?;
            let time = |strategy: &str| ClaimResult::Ok(bench.replayed(&program, strategy, None)?.0.driver_ns / pairs);
            let (direct, caching, pool) = (time("direct")?, time(CACHING)?, time("async")?);
            let (of_driver, of_cache) = (Amount::Time(DRIVER_PAIR_NS), Amount::Time(CACHED_PAIR_NS));
            finding.beside("driver time of a pair, direct", Amount::Time(direct), of_driver);
            finding.beside("caching (PyTorch: its own time included)", Amount::Time(caching), of_cache);
            finding.figure("async, the driver's own pool", Amount::Time(pool));
            finding.check("caching takes less time than direct", caching < direct);
            Ok(finding)
        },
    },
    Claim {
        id: "track-allocated",
        group: Group::Allocator,
        statement: "Peak usage is best tracked with max_memory_allocated",
        published: "max_memory_allocated",
        lesson: "A program dies by what is reserved, and by the context beside it: max_memory_reserved is what has to fit.",
        command: "oomph replay variable-length --strategy caching --limit 5.88GiB",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let program = recipe("variable-length", &[])?;
            let whole = bench.memory(&program)?;
            let (allocated, reserved) = (whole.peak_allocated_bytes, whole.peak_reserved_bytes);
            finding.beside("peak allocated", Amount::Size(allocated), Amount::Size(VARIABLE_LENGTH_ALLOCATED));
            finding.beside("peak reserved", Amount::Size(reserved), Amount::Size(VARIABLE_LENGTH_RESERVED));
            let page = 2 << 20;
            let with_allocated = allocated.next_multiple_of(page);
            let suffices =
                |limit| ClaimResult::Ok(bench.replayed(&program, CACHING, Some(limit))?.0.status == Status::Completed);
            let (by_allocated, by_reserved) = (suffices(with_allocated)?, suffices(reserved)?);
            finding.figure("memory of the allocated peak suffices (1: yes)", Amount::Count(u64::from(by_allocated)));
            finding.figure("memory of the reserved peak suffices (1: yes)", Amount::Count(u64::from(by_reserved)));
            let suffices = !DIES_WITH_MORE_THAN_ITS_BLOCKS;
            finding.check_beside("as much memory as max_memory_allocated suffices", by_allocated, suffices);
            Ok(finding)
        },
    },
    Claim {
        id: "frag-sign",
        group: Group::Allocator,
        statement: "High reserved with low allocated memory is fragmentation or cache, and no leak",
        published: "not a leak",
        lesson: "Leaks raise what is allocated; what is reserved and not allocated is cache, or pieces between live blocks. Where \
                 a small leak tears memory, both grow: the detector names the leak, though most of the growth is the other.",
        command: "oomph leaks variable-length; oomph leaks museum-rmm-35; oomph leaks leak-outputs",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let both = "caching:max_split_size_mb:128,expandable_segments:True";
            for (name, strategy) in [
                ("variable-length", CACHING),
                ("museum-rmm-35", CACHING),
                ("phase-change", CACHING),
                ("museum-pytorch-193400", both),
            ] {
                let (observed, found) = bench.growth(&recipe(name, &[])?, strategy, None)?;
                let last = observed.steps.last().copied().unwrap_or_default();
                let idle = last.reserved_bytes.saturating_sub(last.allocated_bytes);
                finding.figure(format!("{name}, reserved and not allocated at the end"), Amount::Size(idle));
                finding.check(format!("{name} is called no leak"), found.verdict != leaks::Verdict::Leak);
            }
            let (_, found) = bench.growth(&recipe("leak-outputs", &[])?, CACHING, None)?;
            finding.check("leak-outputs is called a leak", found.verdict == leaks::Verdict::Leak);
            Ok(finding)
        },
    },
    Claim {
        id: "frag-word",
        group: Group::Allocator,
        statement: "Memory that stays allocated is fragmentation",
        published: "a use of the word",
        lesson: "Fragmentation is free memory that cannot be used. Memory that stays allocated is held by somebody: a leak, if \
                 nobody needs it.",
        command: "oomph leaks leak-outputs-detached",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let program = recipe("leak-outputs-detached", &[("steps", "24")])?;
            let (observed, _) = bench.growth(&program, CACHING, None)?;
            let (first, last) = (observed.judged().first(), observed.judged().last());
            let grown = |of: fn(&leaks::StepUse) -> u64| {
                first.zip(last).map_or(0, |(first, last)| of(last).saturating_sub(of(first)))
            };
            let (allocated, stuck) = (grown(|step| step.allocated_bytes), grown(|step| step.stuck_bytes));
            finding.figure("allocated grows by", Amount::Size(allocated));
            finding.figure("free memory that cannot be given back grows by", Amount::Size(stuck));
            finding.check("free memory that cannot be used grows half as much at least", 2 * stuck >= allocated);
            Ok(finding)
        },
    },
    Claim {
        id: "fraction",
        group: Group::Allocator,
        statement: "Capping the process to a fraction (0.6) of a GPU mimics a smaller GPU",
        published: "the same OOM",
        lesson: "The fraction counts what the allocator takes. A smaller card has to hold the context and the libraries as well, so \
                 it ends earlier: take them off the fraction.",
        command: "oomph leaks leak-cache --set steps=200 --device sim:20GiB --limit 12GiB; oomph leaks leak-cache --set steps=200 --device sim:12GiB",
        on_gpu: false,
        test: |bench| {
            let mut finding = Finding::default();
            let program = recipe("leak-cache", &[("steps", "200")])?;
            let ends_at = |device: &str, limit: Option<u64>| {
                let record = bench.replayed_on(&device.parse()?, &program, CACHING, limit)?.0;
                ClaimResult::Ok(u64::from(record.oom_step.unwrap_or(u32::MAX)))
            };
            let of_fraction = ends_at("sim:20GiB", Some(12 * GIB))?;
            let of_card = ends_at("sim:12GiB", None)?;
            let room = bench.room_in(12 * GIB)?;
            let of_corrected = ends_at("sim:20GiB", Some(room))?;
            finding.figure("0.6 of 20 GiB ends in step", Amount::Count(of_fraction));
            finding.figure("a card of 12 GiB ends in step", Amount::Count(of_card));
            finding.figure("0.6 less context and libraries ends in step", Amount::Count(of_corrected));
            finding.figure("which take", Amount::Size(bench.overhead()?));
            finding.check("both end in the same step", of_fraction == of_card);
            finding
                .check("both end in the same step once context and libraries are taken off", of_corrected == of_card);
            Ok(finding)
        },
    },
    Claim {
        id: "smi-below",
        group: Group::Allocator,
        statement: "nvidia-smi can show less than memory_allocated",
        published: "less",
        lesson: "What is allocated lies in what is reserved, and that in what the device holds: nvidia-smi shows all of it and the \
                 context.",
        command: "oomph replay variable-length --strategy caching --format json",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            for (name, strategy) in [
                ("variable-length", CACHING),
                ("variable-length", EXPANDABLE),
                ("leak-outputs", CACHING),
                ("dangling-del-empty-cache", CACHING),
            ] {
                let detail = bench.replayed(&recipe(name, &[])?, strategy, None)?.1;
                let points = &detail.timeline.points;
                let used = || points.iter().filter_map(|point| Some((point.device_used_bytes?, point.allocated_bytes)));
                // Within a stretch the extremes may lie apart: only what is certain counts.
                let below = used().filter(|(used, allocated)| used.max < allocated.min).count();
                let least = used().map(|(used, allocated)| used.min.saturating_sub(allocated.min)).min();
                finding.figure(format!("{name} under {strategy}, least difference"), Amount::Size(least.unwrap_or(0)));
                finding.check(format!("{name} under {strategy} shows less at some time"), below > 0);
            }
            Ok(finding)
        },
    },
    Claim {
        id: "restart",
        group: Group::Allocator,
        statement: "Memory that is not reclaimed after a restart means a leak",
        published: "a leak",
        lesson: "The driver takes everything back when a process ends. Memory that is still used belongs to a process that is still \
                 there.",
        command: "oomph replay training --set steps=100000 --device cuda --strategy caching, ended by force; then nvidia-smi",
        on_gpu: false,
        test: |_| {
            Ok(Finding::not_measurable(
                "a simulated device ends with its process: what a driver does at the end of one is not simulated",
            ))
        },
    },
    Claim {
        id: "too-large",
        group: Group::Allocator,
        statement: "A model that is too large for the device ends in a kernel launch failure",
        published: "kernel launch failure",
        lesson: "It ends in an OOM while weights are brought to the device, before any kernel.",
        command: "oomph replay load-beyond-capacity --strategy caching",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let record = bench.memory(&recipe("load-beyond-capacity", &[])?)?;
            finding.figure("allocated when memory ran out", Amount::Size(record.peak_allocated_bytes));
            finding.figure("bytes asked for", Amount::Size(record.oom_requested_bytes.unwrap_or(0)));
            let in_loading = record.status == Status::Oom && record.oom_step.is_none();
            finding.check("loading gets through, and a later kernel fails", !in_loading);
            Ok(finding)
        },
    },
];

/// Draws of sequence lengths.
const SEEDS: RangeInclusive<u64> = 1..=6;

/// Training on random lengths, the longest just so that what is alive at the peak fits in `room`; and with 1024 tokens.
fn just_fitting(bench: &Bench<'_>, seed: u64, room: u64) -> ClaimResult<(Recipe, Recipe)> {
    let of_length = |context: u64| {
        let set = [("batch", "8"), ("context", &context.to_string())];
        ClaimResult::Ok(recipe("variable-length", &set)?.seed(seed))
    };
    let needed = |program: &Recipe| ClaimResult::Ok(bench.memory(program)?.peak_requested_bytes);
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
