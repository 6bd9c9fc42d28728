//! The transformer generator, and a server with a pool of pages, against rehearsed PyTorch, request by request, for sizes
//! that were never recorded on a GPU.

use std::path::Path;

use oomph::{base::NoProgress, models::Recipe, trace};

use super::truth::{rehearsed, rehearsed_with};
use crate::allocator_actions::{actions, assert_equal_actions, with_sorted_frees};

/// Layers, width, heads, vocabulary, context and batch; the settings; the techniques.
const PROGRAMS: [([u32; 6], &str, &str); 33] = [
    ([3, 192, 3, 1000, 200, 4], "", ""),
    ([2, 320, 5, 3001, 96, 12], "", "sgd"),
    ([4, 256, 4, 777, 130, 8], "", "ckpt"),
    ([2, 512, 4, 5000, 256, 4], "", "accum4"),
    ([3, 128, 2, 2048, 64, 16], "", "zero_fill,inplace"),
    ([2, 384, 6, 1500, 333, 2], "", "offload"),
    ([3, 256, 2, 900, 512, 3], "", "amp"),
    ([5, 192, 3, 4096, 100, 6], "", "amp,ckpt,empty_cache"),
    // Many tokens: the gradients of norms and tables are made in parts.
    ([1, 64, 2, 300, 1000, 70], "norm=rms", ""),
    ([1, 64, 2, 300, 1000, 70], "", "bf16_model"),
    ([3, 192, 6, 1001, 130, 3], "kv_heads=2 rotary=yes norm=rms activation=silu gated=yes ffn=520 bias=no", "amp,ckpt"),
    ([2, 192, 6, 1000, 130, 3], "kv_heads=2 tied=yes vocab_multiple=64", ""),
    ([2, 240, 3, 503, 77, 5], "rotary=yes activation=gelu tied=yes", "bf16_model"),
    ([2, 256, 4, 900, 210, 4], "dropout=yes activation=gelu_tanh bias=no", "amp,accum4"),
    ([2, 192, 3, 1000, 200, 4], "attention=math dropout=yes causal=no", "amp,ckpt"),
    ([2, 192, 3, 1000, 201, 1], "attention=math rotary=yes", "bf16_model"),
    ([2, 192, 6, 700, 150, 3], "attention=math kv_heads=3 norm=rms", "offload"),
    ([2, 480, 3, 600, 301, 2], "attention=flash kv_heads=1 activation=silu gated=yes", "bf16_model,ckpt"),
    ([1, 192, 3, 600, 1100, 1], "attention=flash", "amp,offload"),
    ([2, 160, 4, 600, 90, 4], "attention=flash dropout=yes rotary=yes tied=yes", "amp"),
    ([2, 160, 2, 600, 309, 3], "attention=efficient dropout=yes norm=rms", "bf16_model"),
    ([2, 320, 2, 600, 111, 3], "attention=efficient gated=yes ffn=333", "amp"),
    ([2, 96, 1, 600, 253, 3], "attention=cudnn rotary=yes bias=no gated=yes", "amp,offload"),
    ([2, 192, 3, 1000, 200, 4], "bias=no gated=yes", "amp,ckpt,inplace"),
    // The gradients of two products that share their input are added to earlier ones.
    ([3, 80, 2, 2000, 32, 2], "gated=yes", "zero_fill"),
    // Number formats of weights, gradients and states apart.
    ([2, 192, 3, 1000, 200, 4], "", "fp16,accum4,ckpt"),
    ([2, 192, 3, 1000, 200, 4], "", "fp16,fused"),
    ([2, 160, 4, 600, 90, 4], "attention=flash dropout=yes rotary=yes tied=yes", "fp16,sgd,offload"),
    ([2, 192, 3, 1000, 200, 4], "dropout=yes", "bf16_master,zero_fill,foreach_off"),
    ([2, 192, 3, 1000, 200, 4], "", "bf16_master,sgd"),
    ([2, 320, 5, 3001, 96, 12], "", "bf16_model,fp32_grads,accum4"),
    ([2, 192, 3, 1000, 200, 4], "", "bf16_model,fp32_grads,zero_fill,sgd"),
    (
        [2, 192, 6, 1000, 130, 4],
        "kv_heads=2 tied=yes rotary=yes norm=rms bias=no",
        "bf16_master,fp32_grads,accum4,ckpt",
    ),
];
const NAMES: [&str; 6] = ["layers", "width", "heads", "vocab", "context", "batch"];
const STEPS: &str = "3";

/// The programs to rehearse: every third, because each takes seven seconds. `OOMPH_ALL_PROGRAMS=1`, which `.ci/scheduled` sets, takes
/// all of them.
pub(super) fn chosen<T>(programs: &[T]) -> impl Iterator<Item = &T> {
    let all = std::env::var_os("OOMPH_ALL_PROGRAMS").is_some();
    programs.iter().step_by(if all { 1 } else { 3 })
}

/// A Python program that trains the reference GPT.
pub(super) struct GptProgram<'a> {
    /// Its file in this folder.
    pub(super) file: &'a str,
    /// Options of `oomph rehearse`.
    pub(super) options: &'a [&'a str],
    /// Layers, width, heads, vocabulary, context and batch.
    pub(super) sizes: [u32; 6],
    pub(super) settings: &'a str,
    /// The techniques that the program gets.
    pub(super) techniques: &'a str,
    /// The same for the generator.
    pub(super) modelled: &'a str,
}

impl GptProgram<'_> {
    /// Where the generator first differs from the rehearsed program. Nothing without PyTorch.
    pub(super) fn difference(&self) -> Option<Result<(), String>> {
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/integration/rehearse").join(self.file);
        let sizes = NAMES.iter().zip(self.sizes).map(|(name, size)| (*name, size.to_string()));
        let chosen = self.settings.split_whitespace().map(|setting| setting.split_once('=').unwrap());
        let all: Vec<(&str, String)> = sizes.chain(chosen.map(|(name, value)| (name, value.to_owned()))).collect();
        let given: Vec<String> = all.iter().map(|(name, value)| format!("--{name}={value}")).collect();
        let mut words = vec!["python3", program.to_str().unwrap(), "--steps", STEPS, "--techniques", self.techniques];
        words.extend(given.iter().map(String::as_str));
        let folder = rehearsed_with(self.options, &words)?;
        let real = actions(&*trace::open(folder.path().join("out/rank-0.pickle"), &NoProgress).unwrap());
        let recipe =
            Recipe::named("reference-gpt-163m").unwrap().with("steps", STEPS).with("techniques", self.modelled);
        let recipe = all.iter().fold(recipe, |recipe, (name, value)| recipe.with(name, value));
        let ours = actions(&recipe.workload().unwrap());
        let name = format!("{} {}", given.join(" "), self.modelled);
        let (real, ours) = (with_sorted_frees(real), with_sorted_frees(ours));
        let compared = std::panic::catch_unwind(|| assert_equal_actions(&name, &real, &ours));
        Some(compared.map_err(|panic| panic.downcast_ref::<String>().cloned().unwrap()))
    }
}

#[test]
fn the_transformer_generator_requests_what_pytorch_does() {
    let mut failures = Vec::new();
    for &(sizes, settings, techniques) in chosen(&PROGRAMS) {
        let program = GptProgram { file: "gpt.py", options: &[], sizes, settings, techniques, modelled: techniques };
        let Some(compared) = program.difference() else { return };
        failures.extend(compared.err());
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Sizes in the order of `SERVER_NAMES`, number format and captured batch sizes.
const SERVERS: [([u32; 11], &str, &str); 4] = [
    ([2, 128, 2, 1000, 8, 64, 16, 20, 12, 40, 20], "bf16", "1,2,4,8"),
    // Few pages: sequences are computed again.
    ([3, 192, 3, 50_257, 6, 48, 8, 18, 9, 70, 33], "fp32", "2,5"),
    // A vocabulary so large that the choice of a token is split over thread blocks.
    ([2, 256, 4, 151_936, 12, 512, 16, 30, 20, 33, 40], "bf16", ""),
    ([1, 320, 5, 777, 5, 100, 4, 17, 7, 1, 60], "bf16", "3"),
];
const SERVER_NAMES: [&str; 11] = [
    "layers",
    "width",
    "heads",
    "vocab",
    "batch",
    "batched_tokens",
    "page_tokens",
    "pages",
    "requests",
    "prompt",
    "output",
];

#[test]
fn a_server_with_a_pool_requests_what_pytorch_does() {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/integration/rehearse/server.py");
    for (sizes, precision, graphs) in SERVERS {
        let mut words = vec!["python3".to_owned(), program.to_str().unwrap().to_owned()];
        let settings = [("cache", "pool"), ("arrivals", "1.0"), ("precision", precision), ("graphs", graphs)];
        let recipe = Recipe::named("llm-serve").unwrap();
        let mut recipe = settings.iter().fold(recipe, |recipe, (key, value)| recipe.with(key, value));
        for (name, size) in SERVER_NAMES.iter().zip(sizes.map(|size| size.to_string())) {
            words.push(format!("--{name}={size}"));
            recipe = match *name {
                "prompt" | "output" => recipe.with(&format!("min_{name}"), &size).with(&format!("max_{name}"), &size),
                _ => recipe.with(name, &size),
            };
        }
        words.extend([format!("--precision={precision}"), format!("--graphs={graphs}")]);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let Some(folder) = rehearsed(&words) else { return };
        let recording = trace::open(folder.path().join("out/rank-0.pickle"), &NoProgress).unwrap();
        let workload = recipe.workload().unwrap();
        assert_equal_actions(&format!("{sizes:?} {precision} {graphs}"), &actions(&*recording), &actions(&workload));
    }
}
