//! The parts of [`Trainer`] in other orders than the plain loop's, held against recordings of the programs that do so.

use std::{collections::BTreeMap, path::Path};

use super::{
    backward::Retain,
    model::Ending,
    plan::Plan,
    trainer::{Output, Recording, Trainer},
};
use crate::{
    trace::{self, Op, Source, Trace, TraceBuilder},
    workload::{GENERATORS, Given, Parameters},
};

/// A block and its size, asked for or given back; blocks are numbered as they come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Alloc(u64),
    Free(usize, u64),
}

fn actions(source: &dyn Source) -> Vec<Action> {
    let (mut tenants, mut blocks) = (BTreeMap::new(), 0);
    let act = |op| match op {
        Op::Alloc { slot, bytes, .. } => {
            tenants.insert(slot, (blocks, bytes));
            blocks += 1;
            Some(Action::Alloc(bytes))
        }
        Op::Free { slot, .. } => tenants.remove(&slot).map(|(block, bytes)| Action::Free(block, bytes)),
        _ => None,
    };
    Trace::read(source).unwrap().events.into_iter().map(|event| event.op).filter_map(act).collect()
}

/// Runs a program of the reference model at batch 2 and holds its actions against a recording's.
fn assert_recorded(name: &str, steps: u32, mut step: impl FnMut(&mut Trainer)) {
    let entry = GENERATORS.iter().find(|entry| entry.name == "transformer").unwrap();
    let given = BTreeMap::from([("batch".to_owned(), Given::typed("batch", "2"))]);
    let plan = Plan::read(&Parameters::new(name, entry, &given).unwrap()).unwrap();
    let (mut trainer, mut story) = (Trainer::new(plan), TraceBuilder::new());
    trainer.write(&mut story, |trainer| {
        trainer.load();
        (0..steps).for_each(|_| step(trainer));
    });
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("workloads/recorded/{name}.pickle.xz"));
    let (real, ours) = (actions(&*trace::open(path).unwrap()), actions(&story.finish(name)));
    let parting = real.iter().zip(&ours).position(|(real, ours)| real != ours);
    let place = parting.unwrap_or(real.len().min(ours.len()));
    let around = |actions: &[Action]| format!("{:?}", &actions[place.saturating_sub(4)..actions.len().min(place + 8)]);
    assert!(
        parting.is_none() && real.len() == ours.len(),
        "{name}: action {place} of {} and {}\n{}\n{}",
        real.len(),
        ours.len(),
        around(&real),
        around(&ours)
    );
}

/// A forward pass over a batch that nobody keeps.
fn evaluate(trainer: &mut Trainer, recording: Recording) -> Output {
    let batch = trainer.new_batch(1024);
    let output = trainer.forward(batch, recording, Ending::Logits);
    trainer.release(batch);
    output
}

#[test]
fn validation_without_a_graph_is_the_recorded_one() {
    let mut last = None;
    assert_recorded("val_no_grad", 6, |trainer| {
        // This program has a variable for its batch.
        let batch = trainer.fetch_batch(1024);
        let output = trainer.forward(batch, Recording::Off, Ending::Logits);
        if let Some(before) = last.replace(output) {
            trainer.drop_output(before);
        }
    });
}

#[test]
fn validation_with_a_graph_is_the_recorded_one() {
    let mut last = None;
    assert_recorded("val_with_grad", 6, |trainer| {
        let output = evaluate(trainer, Recording::On);
        if let Some(before) = last.replace(output) {
            trainer.drop_output(before);
        }
    });
}

#[test]
fn kept_outputs_are_the_recorded_ones() {
    let mut kept = Vec::new();
    assert_recorded("val_keep_outputs", 6, |trainer| kept.push(evaluate(trainer, Recording::On)));
    kept.clear();
    assert_recorded("val_keep_no_grad", 6, |trainer| kept.push(evaluate(trainer, Recording::Off)));
}

#[test]
fn kept_logits_of_a_second_pass_are_the_recorded_ones() {
    let mut kept = Vec::new();
    assert_recorded("leak_outputs", 6, |trainer| {
        let batch = trainer.fetch_batch(1024);
        let output = trainer.forward(batch, Recording::On, Ending::Loss);
        let loss = trainer.bind_loss(output);
        kept.push(trainer.forward(batch, Recording::On, Ending::Logits));
        trainer.backward(loss, Retain::Nothing);
        trainer.optimizer_step();
        trainer.zero_grad();
    });
}

#[test]
fn two_backwards_over_one_graph_are_the_recorded_ones() {
    let mut last: Option<Output> = None;
    assert_recorded("leak_retain_twice", 6, |trainer| {
        let batch = trainer.fetch_batch(1024);
        let mut output = Some(trainer.forward(batch, Recording::On, Ending::Loss));
        if let Some(before) = last.take() {
            trainer.drop_output(before);
        }
        for _ in 0..2 {
            output = output.take().and_then(|output| trainer.backward(output, Retain::Graph));
        }
        last = output;
        trainer.optimizer_step();
        trainer.zero_grad();
    });
}

#[test]
fn gradients_that_are_never_dropped_are_the_recorded_ones() {
    assert_recorded("leak_no_zero_grad", 8, |trainer| {
        let batch = trainer.fetch_batch(1024);
        let output = trainer.forward(batch, Recording::On, Ending::Loss);
        let output = trainer.bind_loss(output);
        trainer.backward(output, Retain::Nothing);
        trainer.optimizer_step();
    });
}
