//! The technique `fsdp` against rehearsed ranks of PyTorch's FSDP2, request by request.

use std::path::Path;

use oomph::{base::NoProgress, models::Recipe, trace};

use super::truth::rehearsed_with;
use crate::allocator_actions::{actions, assert_equal_actions, with_sorted_frees};

/// Ranks; layers, width, heads, vocabulary, context and batch; the techniques besides `fsdp`. Most sizes cannot be divided
/// evenly.
const PROGRAMS: [(u32, [u32; 6], &str); 9] = [
    (2, [3, 192, 3, 1000, 200, 4], ""),
    (4, [3, 192, 3, 1001, 203, 4], ""),
    (4, [4, 256, 4, 777, 130, 8], "bf16_master,ckpt"),
    (8, [3, 200, 5, 4099, 77, 4], "bf16_master,accum4"),
    (2, [3, 256, 4, 777, 130, 8], "bf16_model"),
    (4, [5, 192, 3, 4097, 100, 6], "amp,ckpt,empty_cache"),
    (3, [2, 320, 5, 3001, 96, 12], "foreach_off,zero_fill"),
    (4, [4, 256, 4, 777, 130, 8], "offload_params,bf16_master,ckpt"),
    (3, [3, 200, 5, 1001, 77, 4], "offload_params,accum4"),
];
const NAMES: [&str; 6] = ["layers", "width", "heads", "vocab", "context", "batch"];
const STEPS: &str = "3";

#[test]
fn fully_sharded_ranks_request_what_pytorch_does() {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/integration/rehearse/fsdp.py");
    let mut failures = Vec::new();
    for (ranks, sizes, techniques) in PROGRAMS {
        let sizes = sizes.map(|size| size.to_string());
        let sizes_given: Vec<String> =
            NAMES.iter().zip(&sizes).map(|(name, size)| format!("--{name}={size}")).collect();
        let mut words = vec!["python3", program.to_str().unwrap(), "--steps", STEPS, "--techniques", techniques];
        words.extend(sizes_given.iter().map(String::as_str));
        let Some(folder) = rehearsed_with(&["--ranks", &ranks.to_string(), "--rank", "0"], &words) else { return };
        let real = actions(&*trace::open(folder.path().join("out/rank-0.pickle"), &NoProgress).unwrap());
        let techniques = [&format!("fsdp:{ranks}"), techniques].join(",");
        let techniques = techniques.trim_end_matches(',');
        let recipe = Recipe::named("reference-gpt-163m").unwrap().with("steps", STEPS).with("techniques", techniques);
        let recipe = NAMES.iter().zip(&sizes).fold(recipe, |recipe, (name, size)| recipe.with(name, size));
        let ours = actions(&recipe.workload().unwrap());
        let name = format!("{} {techniques}", sizes.join(" x "));
        let (real, ours) = (with_sorted_frees(real), with_sorted_frees(ours));
        if let Err(panic) = std::panic::catch_unwind(|| assert_equal_actions(&name, &real, &ours)) {
            failures.push(panic.downcast_ref::<String>().cloned().unwrap());
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
