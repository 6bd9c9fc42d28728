//! Compares two sequences of allocator requests; shared by the tests against recordings.

use std::{collections::BTreeMap, path::Path};

use oomph::{
    base::NoProgress,
    trace::{self, Op, Source, Trace},
};

/// A request to an allocator, with the size of its block. Blocks are numbered in order of
/// allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Action {
    Alloc { bytes: u64 },
    Free { block: usize, bytes: u64 },
}

pub fn actions(source: &dyn Source) -> Vec<Action> {
    let (mut live, mut blocks) = (BTreeMap::new(), 0);
    let mut actions = Vec::new();
    for event in Trace::read(source).unwrap().events {
        match event.op {
            Op::Alloc { slot, bytes, .. } => {
                live.insert(slot, (blocks, bytes));
                blocks += 1;
                actions.push(Action::Alloc { bytes });
            }
            Op::Free { slot, .. } => {
                let (block, bytes) = live.remove(&slot).unwrap();
                actions.push(Action::Free { block, bytes });
            }
            _ => {}
        }
    }
    actions
}

pub fn recorded(name: &str) -> Vec<Action> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("workloads/recorded/{name}.pickle.xz"));
    actions(&*trace::open(path, &NoProgress).unwrap())
}

/// Sorts every run of frees: autocast drops its copies of weights in the order of a hash table of addresses.
pub fn with_sorted_frees(mut actions: Vec<Action>) -> Vec<Action> {
    for run in actions.chunk_by_mut(|one, next| matches!((one, next), (Action::Free { .. }, Action::Free { .. }))) {
        run.sort_unstable();
    }
    actions
}

/// Asserts that two sequences are equal, and shows the first difference.
pub fn assert_equal_actions(name: &str, real: &[Action], ours: &[Action]) {
    let place = real.iter().zip(ours).position(|(real, ours)| real != ours);
    let place = place.unwrap_or(real.len().min(ours.len()));
    let around = |actions: &[Action]| {
        actions[place.saturating_sub(6)..(place + 10).min(actions.len())]
            .iter()
            .map(|action| format!("\n    {action:?}"))
            .collect::<String>()
    };
    assert!(
        place == real.len() && place == ours.len(),
        "{name}: action {place} differs ({} real, {} ours)\n  real:{}\n  ours:{}",
        real.len(),
        ours.len(),
        around(real),
        around(ours)
    );
}
