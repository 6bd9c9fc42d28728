//! The model in a program that is not a recipe, compared with the recording of that program.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use super::{
    graph::SavingMode,
    layers::INDEX,
    machine::{ForwardResult, ModelArchitecture, TensorMachine, TrainingBatch},
    models::transformer::Transformer,
    plan::TrainingPlan,
};
use crate::{GENERATORS, GivenValue, Parameters};
use oomph_trace::{self, Category, Op, Source, Trace, TraceBuilder};

/// A block and its size, allocated or freed; blocks are numbered in order.
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

/// The reference model with this many sequences in a batch.
fn reference_model(batch: &str) -> TrainingPlan {
    let entry = GENERATORS.iter().find(|entry| entry.name == "transformer").unwrap();
    let given = BTreeMap::from([("batch".to_owned(), GivenValue::typed("batch", batch))]);
    TrainingPlan::read(&Parameters::new("reference", entry, &given).unwrap()).unwrap()
}

fn assert_same_actions(name: &str, trace: TraceBuilder) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("workloads/recorded/{name}.pickle.xz"));
    let (real, ours) =
        (actions(&*oomph_trace::open(path, &oomph_base::NoProgress).unwrap()), actions(&trace.finish(name)));
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

/// Passes without a graph over 4 x 64 tokens, beside a list of caches of various sizes. When there are more than twelve,
/// one from the middle is freed.
#[test]
fn inference_beside_growing_caches_is_as_recorded() {
    let plan = reference_model("4");
    let model = Arc::new(Transformer::new(&plan));
    let mut machine = TensorMachine::new(plan, model.clone());
    machine.saving = SavingMode::Off;
    machine.load();
    let (mut caches, mut last_batch) = (Vec::new(), None);
    for pass in 0..96 {
        (machine.graph.sequences, machine.graph.length) = (4, 64);
        let batch = machine.copy_in(INDEX * 4 * 64, Category::Input);
        if let Some(before) = last_batch.replace(batch) {
            machine.release(before);
        }
        let logits = model.forward(&mut machine, TrainingBatch { input: batch, targets: None }, ForwardResult::Logits);
        caches.push(machine.alloc((pass % 7 + 1) * 2 * 768 * 1024, Category::Activation));
        if caches.len() > 12 {
            let gone = caches.remove((pass * 5 % 7) as usize);
            machine.release(gone);
        }
        machine.release(logits.tensor);
    }
    assert_same_actions("infer_kv", machine.trace);
}
