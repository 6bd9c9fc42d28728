//! The technique `sequence_parallel` against a rehearsed rank of PyTorch's tensor-parallel plan, request by request.

use super::generators::{GptProgram, chosen};

/// Ranks; layers, width, heads, vocabulary, context and batch; the settings; the techniques besides `sequence_parallel`.
const PROGRAMS: [(u32, [u32; 6], &str, &str); 16] = [
    (2, [2, 192, 4, 1000, 200, 4], "", ""),
    (4, [3, 256, 8, 1024, 128, 1], "", ""),
    (2, [2, 256, 4, 1000, 130, 4], "", "amp"),
    (2, [3, 192, 4, 1000, 200, 4], "", "ckpt"),
    (4, [2, 256, 8, 1024, 128, 2], "norm=rms activation=silu gated=yes bias=no ffn=520", "bf16_model"),
    (2, [2, 192, 4, 1000, 64, 8], "", "sgd,accum4"),
    (4, [2, 256, 8, 1024, 1024, 4], "norm=rms gated=yes activation=gelu", "amp,ckpt"),
    (
        2,
        [2, 192, 4, 1000, 130, 3],
        "kv_heads=2 rotary=yes norm=rms activation=silu gated=yes bias=no ffn=520",
        "amp,ckpt",
    ),
    (4, [2, 256, 4, 900, 212, 4], "dropout=yes activation=gelu_tanh", "amp,accum4"),
    // One head and one sequence on a rank.
    (2, [2, 192, 2, 1000, 200, 1], "rotary=yes", ""),
    (2, [2, 192, 4, 1000, 64, 2], "", "fused,amp"),
    (3, [2, 240, 6, 999, 99, 5], "norm=rms causal=no", "foreach_off,zero_fill"),
    // Vocabularies that cannot be divided evenly, and one with fewer tokens than two for each rank.
    (4, [1, 128, 4, 1001, 64, 3], "", "amp"),
    (5, [2, 160, 5, 7, 10, 8], "activation=gelu_tanh gated=yes ffn=85", "amp"),
    // One token of a sequence on a rank.
    (3, [3, 120, 3, 5001, 3, 1], "norm=rms activation=gelu_tanh gated=yes bias=no dropout=yes ffn=450", "zero_fill"),
    (4, [1, 64, 4, 5001, 256, 3], "bias=no rotary=yes dropout=yes causal=no attention=math", "bf16_model"),
];

#[test]
fn ranks_with_parts_of_sequences_request_what_pytorch_does() {
    let mut failures = Vec::new();
    for &(ranks, sizes, settings, techniques) in chosen(&PROGRAMS) {
        let modelled = [&format!("sequence_parallel:{ranks}"), techniques].join(",");
        let program = GptProgram {
            file: "sequence.py",
            options: &["--ranks", &ranks.to_string(), "--rank", "0"],
            sizes,
            settings,
            techniques,
            modelled: modelled.trim_end_matches(','),
        };
        let Some(compared) = program.difference() else { return };
        failures.extend(compared.err());
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
