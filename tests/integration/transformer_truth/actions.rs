//! Against the recordings, action by action: kind, size and order.

use oomph::models::Recipe;

use crate::allocator_actions::{Action, actions, assert_equal_actions, recorded, with_sorted_frees};

fn generated(settings: &[(&str, &str)]) -> Vec<Action> {
    let recipe = settings
        .iter()
        .fold(Recipe::named("reference-gpt-163m").unwrap(), |recipe, (key, text)| recipe.with(key, text));
    generated_by(&recipe)
}

pub(crate) fn generated_by(recipe: &Recipe) -> Vec<Action> {
    actions(&recipe.workload().unwrap())
}

#[test]
fn plain_run_matches_recording_by_action() {
    assert_equal_actions("train_base", &recorded("train_base"), &generated(&[]));
}

#[test]
fn half_batch_matches_recording_by_action() {
    assert_equal_actions("train_halfbatch", &recorded("train_halfbatch"), &generated(&[("batch", "4")]));
}

#[test]
fn techniques_match_recordings_by_action() {
    let mut failures = Vec::new();
    for (name, techniques) in [
        ("train_sgd", "sgd"),
        ("train_zero_fill", "zero_fill"),
        ("train_emptycache", "empty_cache"),
        ("train_accum4", "accum4"),
        ("train_inplace", "inplace"),
        ("train_ckpt", "ckpt"),
        ("train_offload", "offload"),
        ("train_amp", "amp"),
        ("train_ckpt_amp", "amp,ckpt"),
    ] {
        let (mut real, mut ours) = (recorded(name), generated(&[("techniques", techniques)]));
        if techniques.contains("amp") {
            (real, ours) = (with_sorted_frees(real), with_sorted_frees(ours));
        }
        if let Err(panic) = std::panic::catch_unwind(|| assert_equal_actions(name, &real, &ours)) {
            failures.push(panic.downcast_ref::<String>().cloned().unwrap());
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// The settings of a run with random lengths. The lengths come from its recording, where each step
/// starts with the batch, eight bytes per token.
pub(crate) fn of_recorded_lengths(name: &str, batch: u64) -> [(&'static str, String); 3] {
    let allocs: Vec<u64> = recorded(name)
        .into_iter()
        .filter_map(|action| match action {
            Action::Alloc { bytes } => Some(bytes),
            Action::Free { .. } => None,
        })
        .collect();
    let begins_step = |window: &&[u64]| {
        let (length, row) = (window[0] / (8 * batch), 768 * 4);
        window[1..] == [batch * length * row, 8 * length, length * row, batch * length * row]
    };
    let lengths: Vec<String> =
        allocs.windows(5).filter(begins_step).map(|window| (window[0] / (8 * batch)).to_string()).collect();
    [("batch", batch.to_string()), ("steps", lengths.len().to_string()), ("lengths", lengths.join(","))]
}

#[test]
fn random_lengths_match_recordings_by_action() {
    for (name, batch) in [("varlen", 4), ("varlen.seed2", 6), ("varlen_stack", 2)] {
        let settings = of_recorded_lengths(name, batch);
        let settings = settings.each_ref().map(|(key, value)| (*key, value.as_str()));
        assert_equal_actions(name, &recorded(name), &generated(&settings));
    }
}
