//! Inference against its recording, action by action: kind, size and order.

use std::{collections::BTreeMap, path::Path};

use super::super::{
    embedding::INDEX, machine::Machine, model::Ending, plan::Plan, precision::Precision, saving::Saving, shape::Shape,
    technique::Techniques,
};
use crate::trace::{self, Category, Op, Source, Trace};

/// Blocks and their sizes, asked for (true) or given back; blocks are numbered as they come.
fn actions(source: &dyn Source) -> Vec<(bool, usize, u64)> {
    let (mut tenants, mut blocks) = (BTreeMap::new(), 0);
    let act = |op| match op {
        Op::Alloc { slot, bytes, .. } => {
            tenants.insert(slot, (blocks, bytes));
            blocks += 1;
            Some((true, blocks - 1, bytes))
        }
        Op::Free { slot, .. } => tenants.remove(&slot).map(|(block, bytes)| (false, block, bytes)),
        _ => None,
    };
    Trace::read(source).unwrap().events.into_iter().map(|event| event.op).filter_map(act).collect()
}

/// Passes without a graph over 4 x 64 tokens, beside a list of caches: each of another size, and of more than twelve one
/// from the middle goes.
#[test]
fn inference_beside_growing_caches_is_the_recorded_one() {
    let shape = Shape {
        layers: 12,
        width: 768,
        heads: 12,
        vocabulary: 50257,
        context: 1024,
        batch: 4,
        min_length: 1024,
        mixture: None,
    };
    let precision = Precision::Single { tf32: false };
    let mut machine = Machine::new(Plan { shape, precision, techniques: Techniques::default() });
    machine.saving = Saving::Nothing;
    machine.load();
    let (mut caches, mut last_batch) = (Vec::new(), None);
    for pass in 0..96 {
        (machine.graph.sequences, machine.graph.length) = (4, 64);
        let batch = machine.copy_in(INDEX * 4 * 64, Category::Input);
        if let Some(before) = last_batch.replace(batch) {
            machine.release(before);
        }
        let logits = machine.forward(batch, Ending::Logits);
        caches.push(machine.alloc((pass % 7 + 1) * 2 * 768 * 1024, Category::Activation));
        if caches.len() > 12 {
            let gone = caches.remove((pass * 5 % 7) as usize);
            machine.release(gone);
        }
        machine.release(logits.tensor);
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("workloads/recorded/infer_kv.pickle.xz");
    let (real, ours) = (actions(&*trace::open(path).unwrap()), actions(&machine.story.finish("infer_kv")));
    let parting = real.iter().zip(&ours).position(|(real, ours)| real != ours);
    assert_eq!((parting, real.len()), (None, ours.len()));
}
