//! The technique `fsdp` against rehearsed ranks of PyTorch's FSDP2, request by request.

use super::generators::{GptProgram, chosen};

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

#[test]
fn fully_sharded_ranks_request_what_pytorch_does() {
    let mut failures = Vec::new();
    for &(ranks, sizes, techniques) in chosen(&PROGRAMS) {
        let modelled = [&format!("fsdp:{ranks}"), techniques].join(",");
        let program = GptProgram {
            file: "fsdp.py",
            options: &["--ranks", &ranks.to_string(), "--rank", "0"],
            sizes,
            settings: "",
            techniques,
            modelled: modelled.trim_end_matches(','),
        };
        let Some(compared) = program.difference() else { return };
        failures.extend(compared.err());
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
