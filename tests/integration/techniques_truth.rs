//! The comparison of techniques against real PyTorch.
//!
//! The reference GPT (24 layers x 1024, batch 8 x 1024 tokens, fp32 weights, AdamW) in PyTorch
//! 2.11.0+cu130 on one NVIDIA H200: the peak of `memory_allocated` and the median step time of one
//! run each. Byte counts are reproducible to the byte; times vary by a few percent between runs.

use oomph::{
    answer::techniques::{TECHNIQUES, Technique, TechniqueRecord, TechniquesQuestion, techniques},
    models::Recipe,
};

/// Memory and time that PyTorch needed with one technique.
struct Measured {
    technique: &'static str,
    peak_allocated: u64,
    step_ms: f64,
}

const fn measured(technique: &'static str, peak_allocated: u64, step_ms: f64) -> Measured {
    Measured { technique, peak_allocated, step_ms }
}

const BASE: Measured = measured("base", 19_630_711_808, 424.42);
const PYTORCH: [Measured; 10] = [
    measured("amp", 15_471_859_200, 83.757),
    measured("ckpt", 10_757_661_696, 510.714),
    measured("half_batch", 12_289_467_392, 223.023),
    measured("accum4", 10_240_525_312, 476.695),
    measured("offload", 9_884_124_160, 1144.54),
    measured("empty_cache", 19_630_711_808, 434.757),
    measured("inplace", 19_630_711_808, 432.057),
    measured("zero_fill", 21_255_857_152, 427.404),
    measured("amp+ckpt", 10_020_400_640, 95.22),
    measured("tf32", 19_630_711_808, 150.819),
];

/// Percentage points.
const MEMORY_TOLERANCE: f64 = 2.0;
/// Relative to the measured ratio.
const TIME_TOLERANCE: f64 = 0.15;

fn simulated() -> Vec<TechniqueRecord> {
    let of_interest = |technique: &&Technique| PYTORCH.iter().any(|measured| measured.technique == technique.id);
    let chosen: Vec<&Technique> = TECHNIQUES.iter().filter(of_interest).collect();
    let models = vec![Recipe::named("reference-gpt-406m").unwrap()];
    let question = TechniquesQuestion {
        techniques: chosen,
        cards: Vec::new(),
        jobs: 2,
        ..TechniquesQuestion::new(models, "sim".parse().unwrap()).unwrap()
    };
    let mut records = Vec::new();
    techniques(&question, |_, _| true, |row| records.push(row.record)).unwrap();
    records
}

#[test]
fn techniques_match_pytorch() {
    let records = simulated();
    assert_eq!(records.len(), PYTORCH.len());
    for measured in &PYTORCH {
        let record = records.iter().find(|record| record.technique == measured.technique).unwrap();
        let reduction = 100.0 * (1.0 - measured.peak_allocated as f64 / BASE.peak_allocated as f64);
        let simulated = 100.0 * record.allocated_reduction_share.unwrap();
        assert!(
            (simulated - reduction).abs() <= MEMORY_TOLERANCE,
            "{}: memory falls by {simulated:.1} %, in PyTorch by {reduction:.1} %",
            measured.technique
        );
        let (ratio, simulated) = (measured.step_ms / BASE.step_ms, record.step_ratio.unwrap());
        assert!(
            (simulated / ratio - 1.0).abs() <= TIME_TOLERANCE,
            "{}: a step takes {simulated:.3} of the base's time, in PyTorch {ratio:.3}",
            measured.technique
        );
    }
}
