//! Claims about `del`, `gc.collect()` and `empty_cache()`.

use super::{
    Claim, Group,
    bench::{CACHING, ClaimResult, model, recipe},
    finding::{Amount, Finding, ratio, reduction},
    pytorch::gpt_355m,
};

pub(super) const CLAIMS: &[Claim] = &[
    Claim {
        id: "empty-cache",
        group: Group::Allocator,
        statement: "empty_cache in every step slows training by 5-15 %",
        published: "5-15 %",
        lesson: "It costs some dozens of driver calls a step, which is little beside a long step and much beside a short one; it \
                 lowers reserved memory between steps and never the peak of what is allocated.",
        command: "oomph techniques --model gpt-355m --technique empty_cache",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let base = bench.step(&model(MODEL, "")?)?;
            let plain = bench.memory(&model(MODEL, "")?)?;
            let mut every_step = None;
            for (name, techniques) in [
                ("after forward", "empty_cache:forward"),
                ("after backward", "empty_cache:backward"),
                ("after each step", "empty_cache"),
                ("after every third step", "empty_cache:3"),
                ("at phase changes", "empty_cache:phase"),
            ] {
                let program = model(MODEL, techniques)?;
                let record = bench.memory(&program)?;
                let more_calls = record.driver_calls.saturating_sub(plain.driver_calls);
                let slower = base.zip(bench.step(&program)?).map(|(base, step)| 100.0 * (ratio(base.0, step.0) - 1.0));
                if let Some(slower) = slower {
                    if techniques == "empty_cache" {
                        every_step = Some(slower);
                        let truth = 100.0 * (gpt_355m::EMPTY_CACHE.step_ms / gpt_355m::BASE.step_ms - 1.0);
                        finding.beside(format!("{name}, slower by"), Amount::Percent(slower), Amount::Percent(truth));
                    } else {
                        finding.figure(format!("{name}, slower by"), Amount::Percent(slower));
                    }
                }
                finding.figure(format!("{name}, driver calls more in three steps"), Amount::Count(more_calls));
                let saved = reduction(plain.peak_reserved_bytes, record.peak_reserved_bytes);
                finding.figure(format!("{name}, peak reserved lower by"), Amount::Percent(saved));
            }
            if let Some(slower) = every_step {
                finding.check_range("after each step it is slower by", slower, 5.0..=15.0, " %");
                finding.check("it is slower at all", slower > 0.1);
            }
            Ok(finding)
        },
    },
    Claim {
        id: "empty-cache-oom",
        group: Group::Allocator,
        statement: "Calling empty_cache before the next phase prevents an OOM",
        published: "prevents OOM",
        lesson: "The allocator frees its cache and tries again before it fails, so the call only helps where the cache of one phase \
                 is torn by blocks that the next one leaves.",
        command: "oomph threshold phase-change --strategy caching; oomph threshold phase-change --set techniques=empty_cache:phase --strategy caching",
        on_gpu: false,
        test: |bench| {
            let mut finding = Finding::default();
            for name in ["phase-change", "variable-length"] {
                let needed =
                    |techniques: &str| bench.smallest_memory(&recipe(name, &[("techniques", techniques)])?, CACHING);
                let (Some(without), Some(with)) = (needed("")?, needed("empty_cache:phase")?) else { continue };
                finding.figure(format!("{name}, smallest memory without"), Amount::Size(without));
                finding.figure(format!("{name}, with"), Amount::Size(with));
                finding.check(format!("{name} needs at least 1 % less with it"), reduction(without, with) >= 1.0);
            }
            Ok(finding)
        },
    },
    Claim {
        id: "dangling",
        group: Group::Allocator,
        statement: "`del` alone does not give memory back; gc.collect and empty_cache do",
        published: "del, gc.collect and empty_cache together",
        lesson: "`del` of the last name frees a tensor at once for PyTorch's own use. gc only finds what refers to itself, \
                 empty_cache only hands cached memory back to the driver, where nvidia-smi and other processes see it.",
        command: "oomph replay dangling-del --strategy caching (and dangling-gc, dangling-empty-cache, ... : all eight)",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let mut levels = Vec::new();
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
                let program = recipe("dangling", &[("remedy", remedy)])?;
                let (observed, _) = bench.growth(&program, CACHING, None)?;
                let last = observed.steps.last().copied().unwrap_or_default();
                finding.figure(format!("{remedy}, allocated"), Amount::Size(last.allocated_bytes));
                finding.figure(format!("{remedy}, reserved"), Amount::Size(last.reserved_bytes));
                levels.push((remedy, last));
            }
            let of = |wanted: &str| {
                levels.iter().find(|(remedy, _)| *remedy == wanted).map(|(_, step)| *step).unwrap_or_default()
            };
            let less = |base: u64, changed: u64| reduction(base, changed) >= 1.0;
            let none = of("none");
            finding.check(
                "after `del` alone as much is allocated",
                !less(none.allocated_bytes, of("del").allocated_bytes),
            );
            finding
                .check("after `del` alone as much is reserved", !less(none.reserved_bytes, of("del").reserved_bytes));
            let names_stay = of("gc_empty_cache");
            finding.check(
                "gc.collect and empty_cache without `del` lower what is allocated",
                less(none.allocated_bytes, names_stay.allocated_bytes),
            );
            let all = of("del_gc_empty_cache");
            finding.check("all three lower what is reserved", less(none.reserved_bytes, all.reserved_bytes));
            Ok(finding)
        },
    },
    Claim {
        id: "gc-step",
        group: Group::Leaks,
        statement: "gc.collect in the loop lowers memory",
        published: "lower memory",
        lesson: "It frees what refers to itself, and nothing else: a loop without cycles gains nothing and pays for the call.",
        command: "oomph replay leak-cycle-collected-fixed --strategy caching; oomph replay gpt-124m --set techniques=gc --strategy caching",
        on_gpu: true,
        test: |bench| {
            let mut finding = Finding::default();
            let peak = |program| ClaimResult::Ok(bench.memory(&program)?.peak_allocated_bytes);
            let plain = (peak(model("gpt-124m", "")?)?, peak(model("gpt-124m", "gc")?)?);
            let cycles = (peak(recipe("leak-cycle", &[])?)?, peak(recipe("leak-cycle-collected-fixed", &[])?)?);
            finding.figure("without cycles, peak lower by", Amount::Size(plain.0.saturating_sub(plain.1)));
            finding.figure("with cycles, peak lower by", Amount::Size(cycles.0.saturating_sub(cycles.1)));
            finding.check("a loop without cycles needs less", plain.1 < plain.0);
            finding.check("a loop with cycles needs less", cycles.1 < cycles.0);
            Ok(finding)
        },
    },
];

const MODEL: &str = "gpt-355m";
