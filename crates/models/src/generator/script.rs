//! A pattern written out word by word in its recipe: for reported failures whose exact requests are known.
//!
//! `name=SIZE` asks for a block, `-name` gives the oldest block of that name back; what is alive at the end is given back
//! then. `name=SIZE+STEP` and `name=SIZE*FACTOR` grow from cycle to cycle, `name=SIZE@2` is on the second side stream.
//! `sync` waits for the device, `empty_cache` gives cached memory back. There is no chance in it.

use std::{collections::VecDeque, sync::Arc};

use super::{Generator, GeneratorEntry, start};
use crate::{Parameter, Parameters, WorkloadError};
use oomph_base::{Bytes, GIB, StreamId, TagId};
use oomph_trace::{BlockSlot, MarkKind, TraceBuilder};

pub(super) const ENTRY: GeneratorEntry = GeneratorEntry {
    name: "script",
    summary: "a pattern written out in its recipe: a=91MiB, b=45.5MiB, keep=2MiB, -a, -b, again and again",
    seeded: false,
    parameters: &[
        Parameter::words("before", "weights=64MiB", "", "what happens first"),
        Parameter::count("before_cycles", 1..=1_000_000, "1", "how often that happens"),
        Parameter::words(
            "cycle",
            "a=91MiB,keep=2MiB,-a",
            "a=1MiB,-a",
            "what happens in each cycle: name=SIZE[+STEP|*FACTOR][@STREAM], -name, sync, empty_cache",
        ),
        Parameter::count("cycles", 1..=100_000_000, "100", "how often that happens"),
    ],
    build: |parameters| {
        let mut names = Vec::new();
        let (before_cycles, cycles) = (parameters.count("before_cycles")?, parameters.count("cycles")?);
        let before = read_words(parameters, "before", before_cycles, &mut names)?;
        let cycle = read_words(parameters, "cycle", cycles, &mut names)?;
        refuse_frees_of_nothing(parameters, &names, [(&before, before_cycles), (&cycle, cycles)])?;
        let parts: Arc<[Part]> = [
            Part { label: "before", has_steps: false, actions: before, cycles: before_cycles },
            Part { label: "cycle", has_steps: true, actions: cycle, cycles },
        ]
        .into_iter()
        .filter(|part| !part.actions.is_empty())
        .collect();
        let names = names.len();
        Ok(start(move |_| Script {
            parts: parts.clone(),
            part: 0,
            cycle: 0,
            streams: vec![StreamId::DEFAULT],
            live: vec![VecDeque::new(); names],
        }))
    },
};

/// Larger than any device; what grows beyond it was not meant to.
const LARGEST: u64 = 1024 * GIB;
const MOST_STREAMS: usize = 256;
/// Whatever grows by these is too large after some thousand cycles, so its size can be worked out anew in each.
const FACTORS: std::ops::RangeInclusive<f64> = 1.01..=1024.0;

/// The place of a name among all names of a script.
type Name = usize;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Action {
    Alloc { name: Name, bytes: u64, growth: Growth, stream: usize },
    Free { name: Name },
    Sync,
    EmptyCache,
}

/// How a size changes from cycle to cycle.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Growth {
    None,
    By(u64),
    Times(f64),
}

impl Growth {
    /// The size in a cycle, at most [`LARGEST`]: saturating, so that growth without end is seen and refused.
    fn of(self, bytes: u64, cycle: u32) -> u64 {
        match self {
            Growth::None => bytes,
            Growth::By(step) => bytes.saturating_add(step.saturating_mul(cycle.into())).min(LARGEST),
            Growth::Times(factor) => {
                // Repeated multiplication is exact to the last bit on every machine; a power function is not.
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
) -> Result<Vec<Action>, WorkloadError> {
    let words = parameters.words(parameter)?;
    words
        .iter()
        .map(|word| {
            let action = read_word(word, names).ok_or_else(|| {
                parameters.refuse(format!(
                    "'{word}' in {parameter} is none of name=SIZE[+STEP|*FACTOR][@STREAM], -name, sync and empty_cache"
                ))
            })?;
            match action {
                Action::Alloc { bytes, growth, .. } if growth.of(bytes, cycles - 1) >= LARGEST => Err(parameters
                    .refuse(format!("'{word}' in {parameter} grows beyond {} in {cycles} cycles", Bytes(LARGEST)))),
                action => Ok(action),
            }
        })
        .collect()
}

fn read_word(word: &str, names: &mut Vec<String>) -> Option<Action> {
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
        "sync" => return Some(Action::Sync),
        "empty_cache" => return Some(Action::EmptyCache),
        _ => {}
    }
    if let Some(name) = word.strip_prefix('-') {
        return place_of(name).map(|name| Action::Free { name });
    }
    let (name, size) = word.split_once('=')?;
    let (size, stream) = match size.split_once('@') {
        Some((size, stream)) => (size, stream.parse().ok().filter(|stream| *stream <= MOST_STREAMS)?),
        None => (size, 0),
    };
    let bytes = |text: &str| text.parse::<Bytes>().ok().map(|bytes| bytes.0).filter(|bytes| *bytes > 0);
    let (size, growth) = if let Some((size, step)) = size.split_once('+') {
        (size, Growth::By(bytes(step)?))
    } else if let Some((size, factor)) = size.split_once('*') {
        (size, Growth::Times(factor.parse().ok().filter(|factor| FACTORS.contains(factor))?))
    } else {
        (size, Growth::None)
    };
    Some(Action::Alloc { name: place_of(name)?, bytes: bytes(size)?, growth, stream })
}

/// Every cycle changes the number of live blocks of a name by the same amount, so the first and the last one tell.
fn refuse_frees_of_nothing(
    parameters: &Parameters<'_>,
    names: &[String],
    parts: [(&[Action], u32); 2],
) -> Result<(), WorkloadError> {
    for (name, word) in names.iter().enumerate() {
        let mut live = 0_i64;
        for (actions, cycles) in parts {
            let (mut change, mut lowest) = (0_i64, 0_i64);
            for action in actions {
                match action {
                    Action::Alloc { name: allocated, .. } if *allocated == name => change += 1,
                    Action::Free { name: freed } if *freed == name => change -= 1,
                    _ => {}
                }
                lowest = lowest.min(change);
            }
            let before_last = live + change * i64::from(cycles - 1);
            if live + lowest < 0 || before_last + lowest < 0 {
                return Err(parameters.refuse(format!("'-{word}' comes where no '{word}' is alive")));
            }
            live += change * i64::from(cycles);
        }
    }
    Ok(())
}

/// Some actions, so many times.
struct Part {
    label: &'static str,
    /// Whether its cycles are the steps of the story.
    has_steps: bool,
    actions: Vec<Action>,
    cycles: u32,
}

struct Script {
    parts: Arc<[Part]>,
    part: usize,
    cycle: u32,
    /// Those that were asked for so far, the default one first.
    streams: Vec<StreamId>,
    /// By name, the oldest first.
    live: Vec<VecDeque<BlockSlot>>,
}

impl Script {
    fn act(&mut self, action: Action, cycle: u32, story: &mut TraceBuilder) {
        match action {
            Action::Alloc { name, bytes, growth, stream } => {
                // At most 256, of the 65,536 that a story can hold.
                while self.streams.len() <= stream
                    && let Ok(another) = story.new_stream()
                {
                    self.streams.push(another);
                }
                let stream = self.streams.get(stream).copied().unwrap_or_default();
                self.live[name].push_back(story.alloc(growth.of(bytes, cycle), stream, TagId(0)));
            }
            Action::Free { name } => {
                if let Some(oldest) = self.live[name].pop_front() {
                    story.free(oldest);
                }
            }
            Action::Sync => story.device_sync(),
            Action::EmptyCache => story.empty_cache(),
        }
    }
}

impl Generator for Script {
    fn advance(&mut self, story: &mut TraceBuilder) -> bool {
        let parts = self.parts.clone();
        let Some(part) = parts.get(self.part) else {
            let left: Vec<BlockSlot> = self.live.iter_mut().flat_map(|blocks| blocks.drain(..)).collect();
            if !left.is_empty() {
                story.mark(MarkKind::Phase, "after", 0);
            }
            left.iter().for_each(|block| story.free(*block));
            return !left.is_empty();
        };
        if self.cycle == 0 {
            story.mark(MarkKind::Phase, part.label, 0);
        }
        if part.has_steps {
            story.mark(MarkKind::Step, part.label, self.cycle);
        }
        for action in &part.actions {
            self.act(*action, self.cycle, story);
        }
        self.cycle += 1;
        if self.cycle == part.cycles {
            (self.part, self.cycle) = (self.part + 1, 0);
        }
        true
    }

    fn left(&self) -> u64 {
        let ahead = self.parts.iter().skip(self.part).map(|part| u64::from(part.cycles));
        ahead.sum::<u64>() - u64::from(self.cycle)
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
    fn what_is_written_is_what_happens() {
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
    fn the_oldest_block_of_a_name_goes_first() {
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
    fn what_makes_no_sense_is_refused_with_the_reason() {
        let named = "name=SIZE[+STEP|*FACTOR][@STREAM], -name, sync and empty_cache";
        for (cycle, cycles, reason) in [
            ("a", "1", format!("'a' in cycle is none of {named}")),
            ("a=0", "1", format!("'a=0' in cycle is none of {named}")),
            ("a=1MiB@999", "1", format!("'a=1MiB@999' in cycle is none of {named}")),
            ("a=1MiB*-2", "1", format!("'a=1MiB*-2' in cycle is none of {named}")),
            ("a=1MiB*2", "99", "'a=1MiB*2' in cycle grows beyond 1024 GiB in 99 cycles".to_owned()),
            ("-a,a=1MiB", "1", "'-a' comes where no 'a' is alive".to_owned()),
            ("a=1MiB,-a,-a", "1", "'-a' comes where no 'a' is alive".to_owned()),
        ] {
            let error = script("", cycle, cycles).workload().err().unwrap().to_string();
            assert_eq!(error, format!("workload 'museum-pytorch-193400': {reason}"));
        }
        // Three are there, and every cycle takes one more than it brings.
        assert!(script("a=1MiB,a=1MiB,a=1MiB", "-a", "3").workload().is_ok());
        assert!(script("a=1MiB,a=1MiB,a=1MiB", "-a", "4").workload().is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_words_are_refused_or_make_a_story_that_gives_everything_back(
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
