//! A pattern that is written out in its recipe: for reported failures whose exact requests are known.
//!
//! `name=SIZE` allocates a block, `-name` frees the oldest block of that name; blocks that are live at the end are freed
//! then. `name=SIZE+STEP` and `name=SIZE*FACTOR` grow from cycle to cycle, `name=SIZE@2` is on the second side stream.
//! `sync` waits for the device, `empty_cache` returns cached memory. Nothing is random.

use std::{collections::VecDeque, sync::Arc};

use super::open_streams;
use crate::{GeneratorEntry, Parameter, Parameters, WorkloadError, generator::in_parts};
use oomph_base::{Bytes, GIB, StreamId, TagId};
use oomph_trace::{BlockSlot, MarkKind, TraceBuilder};

pub(crate) const SCRIPT: GeneratorEntry = GeneratorEntry {
    name: "script",
    summary: "a pattern written out in its recipe: a=91MiB, b=45.5MiB, keep=2MiB, -a, -b, repeated",
    seeded: false,
    parameters: &[
        Parameter::words("before", "weights=64MiB", "", "actions before the first cycle"),
        Parameter::count("before_cycles", 1..=1_000_000, "1", "repetitions of `before`"),
        Parameter::words(
            "cycle",
            "a=91MiB,keep=2MiB,-a",
            "a=1MiB,-a",
            "actions of each cycle: name=SIZE[+STEP|*FACTOR][@STREAM], -name, sync, empty_cache",
        ),
        Parameter::count("cycles", 1..=100_000_000, "100", "repetitions of `cycle`"),
    ],
    build: |parameters| {
        let mut names = Vec::new();
        let (before_cycles, cycles) = (parameters.count("before_cycles")?, parameters.count("cycles")?);
        let before = read_words(parameters, "before", before_cycles, &mut names)?;
        let cycle = read_words(parameters, "cycle", cycles, &mut names)?;
        refuse_frees_of_nothing(parameters, &names, [(&before, before_cycles), (&cycle, cycles)])?;
        let parts: Arc<[ScriptPart]> = [
            ScriptPart { label: "before", has_steps: false, actions: before, cycles: before_cycles },
            ScriptPart { label: "cycle", has_steps: true, actions: cycle, cycles },
        ]
        .into_iter()
        .filter(|part| !part.actions.is_empty())
        .collect();
        let all_cycles: u64 = parts.iter().map(|part| u64::from(part.cycles)).sum();
        Ok(in_parts(all_cycles + 1, move |_| {
            let parts = parts.clone();
            let mut state = ScriptState { streams: Vec::new(), live: vec![VecDeque::new(); names.len()] };
            move |mut cycle, trace: &mut TraceBuilder| {
                for part in parts.iter() {
                    if cycle < part.cycles {
                        part.mark(cycle, trace);
                        part.actions.iter().for_each(|action| state.run(*action, cycle, trace));
                        return;
                    }
                    cycle -= part.cycles;
                }
                state.free_all(trace);
            }
        }))
    },
    count_weights: None,
};

/// Larger than any device: a block that grows beyond it is a mistake in the recipe.
const LARGEST: u64 = 1024 * GIB;
const MOST_STREAMS: usize = 256;
/// A block that grows by such a factor is too large after a few thousand cycles, so computing its size from the first
/// cycle each time stays cheap.
const FACTORS: std::ops::RangeInclusive<f64> = 1.01..=1024.0;

/// One word of a script. Names are places in the list of all names.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ScriptAction {
    Alloc { name: usize, bytes: u64, growth: SizeGrowth, stream: usize },
    Free { name: usize },
    Sync,
    EmptyCache,
}

/// How a size changes from cycle to cycle.
#[derive(Clone, Copy, Debug, PartialEq)]
enum SizeGrowth {
    None,
    By(u64),
    Times(f64),
}

impl SizeGrowth {
    /// The size in a cycle, at most [`LARGEST`]: saturating, so that unbounded growth is seen and refused.
    fn of(self, bytes: u64, cycle: u32) -> u64 {
        match self {
            SizeGrowth::None => bytes,
            SizeGrowth::By(step) => bytes.saturating_add(step.saturating_mul(cycle.into())).min(LARGEST),
            SizeGrowth::Times(factor) => {
                // Repeated multiplication gives the same last bit on every machine; a power function does not.
                let grown = (0..cycle).try_fold(bytes as f64, |size, _| {
                    let next = size * factor;
                    if next < LARGEST as f64 { Ok(next) } else { Err(LARGEST as f64) }
                });
                grown.unwrap_or_else(|largest| largest).max(1.0) as u64
            }
        }
    }
}

fn read_words(
    parameters: &Parameters<'_>,
    parameter: &str,
    cycles: u32,
    names: &mut Vec<String>,
) -> Result<Vec<ScriptAction>, WorkloadError> {
    let words = parameters.words(parameter)?;
    words
        .iter()
        .map(|word| {
            let action = read_word(word, names).ok_or_else(|| {
                parameters.refuse(format!(
                    "'{word}' in {parameter} is not one of name=SIZE[+STEP|*FACTOR][@STREAM], -name, sync, empty_cache"
                ))
            })?;
            match action {
                ScriptAction::Alloc { bytes, growth, .. } if growth.of(bytes, cycles - 1) >= LARGEST => Err(parameters
                    .refuse(format!("'{word}' in {parameter} grows beyond {} in {cycles} cycles", Bytes(LARGEST)))),
                action => Ok(action),
            }
        })
        .collect()
}

fn read_word(word: &str, names: &mut Vec<String>) -> Option<ScriptAction> {
    let mut place_of = |name: &str| {
        let is_name = !name.is_empty() && name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_');
        is_name.then(|| match names.iter().position(|known| known == name) {
            Some(place) => place,
            None => {
                names.push(name.to_owned());
                names.len() - 1
            }
        })
    };
    match word {
        "sync" => return Some(ScriptAction::Sync),
        "empty_cache" => return Some(ScriptAction::EmptyCache),
        _ => {}
    }
    if let Some(name) = word.strip_prefix('-') {
        return place_of(name).map(|name| ScriptAction::Free { name });
    }
    let (name, size) = word.split_once('=')?;
    let (size, stream) = match size.split_once('@') {
        Some((size, stream)) => (size, stream.parse().ok().filter(|stream| *stream <= MOST_STREAMS)?),
        None => (size, 0),
    };
    let bytes = |text: &str| text.parse::<Bytes>().ok().map(|bytes| bytes.0).filter(|bytes| *bytes > 0);
    let (size, growth) = if let Some((size, step)) = size.split_once('+') {
        (size, SizeGrowth::By(bytes(step)?))
    } else if let Some((size, factor)) = size.split_once('*') {
        (size, SizeGrowth::Times(factor.parse().ok().filter(|factor| FACTORS.contains(factor))?))
    } else {
        (size, SizeGrowth::None)
    };
    Some(ScriptAction::Alloc { name: place_of(name)?, bytes: bytes(size)?, growth, stream })
}

/// Every cycle changes the number of live blocks of a name by the same amount, so checking the first and the last cycle
/// is enough.
fn refuse_frees_of_nothing(
    parameters: &Parameters<'_>,
    names: &[String],
    parts: [(&[ScriptAction], u32); 2],
) -> Result<(), WorkloadError> {
    for (name, word) in names.iter().enumerate() {
        let mut live = 0_i64;
        for (actions, cycles) in parts {
            let (mut change, mut lowest) = (0_i64, 0_i64);
            for action in actions {
                match action {
                    ScriptAction::Alloc { name: allocated, .. } if *allocated == name => change += 1,
                    ScriptAction::Free { name: freed } if *freed == name => change -= 1,
                    _ => {}
                }
                lowest = lowest.min(change);
            }
            let before_last = live + change * i64::from(cycles - 1);
            if live + lowest < 0 || before_last + lowest < 0 {
                return Err(parameters.refuse(format!("'-{word}' comes where no '{word}' is live")));
            }
            live += change * i64::from(cycles);
        }
    }
    Ok(())
}

/// A list of actions and how often it is repeated.
struct ScriptPart {
    label: &'static str,
    /// Whether its cycles are the steps of the trace.
    has_steps: bool,
    actions: Vec<ScriptAction>,
    cycles: u32,
}

impl ScriptPart {
    fn mark(&self, cycle: u32, trace: &mut TraceBuilder) {
        if cycle == 0 {
            trace.mark(MarkKind::Phase, self.label, 0);
        }
        if self.has_steps {
            trace.mark(MarkKind::Step, self.label, cycle);
        }
    }
}

struct ScriptState {
    /// Streams opened so far, the default stream first.
    streams: Vec<StreamId>,
    /// Live blocks by name, the oldest first.
    live: Vec<VecDeque<BlockSlot>>,
}

impl ScriptState {
    fn run(&mut self, action: ScriptAction, cycle: u32, trace: &mut TraceBuilder) {
        match action {
            ScriptAction::Alloc { name, bytes, growth, stream } => {
                open_streams(&mut self.streams, stream + 1, trace);
                let stream = self.streams.get(stream).copied().unwrap_or_default();
                self.live[name].push_back(trace.alloc(growth.of(bytes, cycle), stream, TagId(0)));
            }
            ScriptAction::Free { name } => {
                if let Some(oldest) = self.live[name].pop_front() {
                    trace.free(oldest);
                }
            }
            ScriptAction::Sync => trace.device_sync(),
            ScriptAction::EmptyCache => trace.empty_cache(),
        }
    }

    fn free_all(&mut self, trace: &mut TraceBuilder) {
        if self.live.iter().any(|blocks| !blocks.is_empty()) {
            trace.mark(MarkKind::Phase, "after", 0);
        }
        self.live.iter_mut().flat_map(|blocks| blocks.drain(..)).for_each(|block| trace.free(block));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::Recipe;
    use oomph_base::MIB;
    use oomph_trace::{Op, OpKind, Trace, check};

    fn script(before: &str, cycle: &str, cycles: &str) -> Recipe {
        let recipe = Recipe::named("museum-pytorch-193400").unwrap();
        recipe.with("before", before).with("cycle", cycle).with("cycles", cycles)
    }

    #[test]
    fn written_actions_happen() {
        let workload = script("w=1MiB@2", "a=2MiB+1MiB,b=4MiB*1.5,-a,sync,empty_cache", "3").workload().unwrap();
        let trace = Trace::read(&workload).unwrap();
        let mut allocs = Vec::new();
        for event in &trace.events {
            if let Op::Alloc { bytes, stream, .. } = event.op {
                allocs.push((bytes / MIB, stream.0));
            }
        }
        assert_eq!(allocs, [(1, 2), (2, 0), (4, 0), (3, 0), (6, 0), (4, 0), (9, 0)]);
        let summary = check(&workload).unwrap();
        assert_eq!(summary.live_blocks, 0);
        for (kind, count) in [(OpKind::Free, 7), (OpKind::DeviceSync, 3), (OpKind::EmptyCache, 3)] {
            assert_eq!(summary.count(kind), count, "{kind:?}");
        }
    }

    #[test]
    fn oldest_block_of_a_name_is_freed_first() {
        let trace = Trace::read(&script("a=1MiB,a=2MiB", "-a,a=3MiB", "1").workload().unwrap()).unwrap();
        let mut sizes = std::collections::BTreeMap::new();
        let mut freed = Vec::new();
        for event in &trace.events {
            match event.op {
                Op::Alloc { slot, bytes, .. } => drop(sizes.insert(slot, bytes / MIB)),
                Op::Free { slot, .. } => freed.push(sizes[&slot]),
                _ => {}
            }
        }
        assert_eq!(freed, [1, 2, 3]);
    }

    #[test]
    fn nonsense_is_refused_with_the_reason() {
        let named = "name=SIZE[+STEP|*FACTOR][@STREAM], -name, sync, empty_cache";
        for (cycle, cycles, reason) in [
            ("a", "1", format!("'a' in cycle is not one of {named}")),
            ("a=0", "1", format!("'a=0' in cycle is not one of {named}")),
            ("a=1MiB@999", "1", format!("'a=1MiB@999' in cycle is not one of {named}")),
            ("a=1MiB*-2", "1", format!("'a=1MiB*-2' in cycle is not one of {named}")),
            ("a=1MiB*2", "99", "'a=1MiB*2' in cycle grows beyond 1024 GiB in 99 cycles".to_owned()),
            ("-a,a=1MiB", "1", "'-a' comes where no 'a' is live".to_owned()),
            ("a=1MiB,-a,-a", "1", "'-a' comes where no 'a' is live".to_owned()),
        ] {
            let error = script("", cycle, cycles).workload().err().unwrap().to_string();
            assert_eq!(error, format!("workload 'museum-pytorch-193400': {reason}"));
        }
        // Three blocks are live, and every cycle frees one.
        assert!(script("a=1MiB,a=1MiB,a=1MiB", "-a", "3").workload().is_ok());
        assert!(script("a=1MiB,a=1MiB,a=1MiB", "-a", "4").workload().is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_script_is_refused_or_frees_all(
            words in prop::collection::vec(
                prop::sample::select(vec![
                    "a=1MiB", "a=3MiB@1", "b=512B+512B", "b=2KiB*1.1", "-a", "-b", "sync", "empty_cache", "-", "c=", "@",
                ]),
                1..12,
            ),
            cycles in 1..40_u32,
        ) {
            if let Ok(workload) = script("", &words.join(","), &cycles.to_string()).workload() {
                let summary = check(&workload).unwrap();
                prop_assert_eq!(summary.live_blocks, 0);
                prop_assert_eq!(summary.count(OpKind::Alloc), summary.count(OpKind::Free));
            }
        }
    }
}
