//! `oomph fits`, and configurations as sources of other commands.

use std::fs;

use serde_json::Value;

use crate::command::run;

/// Llama 3.2 1B.
const CONFIG: &str = r#"{"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "tie_word_embeddings": true, "max_position_embeddings": 131072}"#;

/// Runs a command in a folder that has the configuration.
#[track_caller]
fn with_config(arguments: &[&str], code: i32) -> (String, String) {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("llama-1b")).unwrap();
    fs::write(folder.path().join("llama-1b/config.json"), CONFIG).unwrap();
    run(&folder, arguments, code)
}

fn rows(out: &str) -> Vec<Value> {
    let document: Value = serde_json::from_str(out).unwrap();
    document["rows"].as_array().unwrap().clone()
}

#[test]
fn the_answer_names_a_way_and_its_largest_batch() {
    let (out, _) = with_config(&["fits", "llama-1b/config.json", "--card", "24GiB", "--context", "512"], 0);
    assert!(out.starts_with("llama-1b (1,235,814,400 weights), batch 1 of 512 tokens: trains on 24GiB"), "{out}");
    assert!(out.contains("\n  with mixed precision, batches up to 1\n"), "{out}");
    assert!(out.contains("at the allocated peak of mixed precision (23.1 GiB)"), "{out}");
}

#[test]
fn ways_that_need_less_take_larger_batches() {
    let arguments = ["fits", "llama-1b/config.json", "--card", "24GiB", "--context", "512", "--format", "json"];
    let rows = rows(&with_config(&arguments, 0).0);
    let of = |techniques: &str| rows.iter().find(|row| row["techniques"] == techniques).unwrap();
    let largest = |techniques: &str| of(techniques)["largest_batch"].as_u64().unwrap();
    assert!(largest("bf16_model,ckpt") > largest("bf16_model"), "{rows:#?}");
    assert!(largest("bf16_model,ckpt,sgd") > largest("bf16_model,ckpt"), "{rows:#?}");
    // 4-bit products of few tokens are not modelled.
    assert_eq!(rows.iter().filter(|row| row["fits"].is_null()).count(), 1, "{rows:#?}");
    for row in rows.iter().filter(|row| !row["fits"].is_null()) {
        let parts = ["weights", "gradients", "optimizer", "activations", "logits", "cache", "temporary", "workspace"];
        let sum: u64 = parts.iter().map(|part| row[format!("{part}_bytes")].as_u64().unwrap()).sum();
        assert_eq!(row["peak_allocated_bytes"].as_u64(), Some(sum), "{row:#?}");
        assert_eq!(row["fits"].as_bool(), Some(row["largest_batch"].as_u64() >= Some(1)), "{row:#?}");
    }
}

#[test]
fn answers_take_weights_and_a_cache() {
    let arguments = ["fits", "llama-1b/config.json", "--card", "24GiB", "--context", "512", "--format", "json"];
    let rows = rows(&with_config(&arguments, 0).0);
    let inference: Vec<&Value> = rows.iter().filter(|row| row["trains"] == false).collect();
    assert_eq!(inference.len(), 2, "{rows:#?}");
    // Keys and values: 16 layers, 8 heads of 64 numbers, 2 bytes, 496 tokens of the prompt.
    let of = |column: &str| inference[0][column].as_u64().unwrap();
    assert_eq!((of("cache_bytes"), of("gradients_bytes")), (2 * 16 * 8 * 64 * 2 * 496, 0));
    assert!(of("weights_bytes") > 2 * 1_235_814_400 && of("largest_batch") > 100, "{inference:#?}");
}

#[test]
fn a_server_takes_what_is_left_for_its_pool() {
    let server = |card: &str, context: &str| {
        let arguments = ["fits", "llama-1b/config.json", "--card", card, "--context", context, "--format", "json"];
        let rows = rows(&with_config(&arguments, if card == "24GiB" { 0 } else { 108 }).0);
        rows.into_iter().rev().find(|row| row["trains"] == false).unwrap()
    };
    let row = server("24GiB", "4000");
    let of = |column: &str| row[column].as_u64().unwrap();
    // 16 layers, 8 heads of 64 numbers, 2 bytes, keys and values. One page of 16 tokens is not used. The allocator does not
    // split off what is left of a segment where that is at most 1 MiB.
    let pool = (of("cache_tokens") + 16) * 2 * 16 * 8 * 64 * 2;
    assert!((pool..=pool + 16 * (1 << 20)).contains(&of("cache_bytes")), "{row:#?}");
    assert_eq!(of("largest_batch"), of("cache_tokens") / 4000);
    // Nearly all of nine tenths of the card: context, weights, a pass and the pool.
    let taken = of("card_bytes") - of("available_bytes") + of("peak_allocated_bytes");
    let share = of("card_bytes") / 10 * 9;
    assert!(taken.abs_diff(share) < share / 1000, "{taken} of {share}");
    assert!(of("peak_reserved_bytes") < of("available_bytes"));
    // Too small for one sequence.
    let row = server("3GiB", "131072");
    assert_eq!((row["fits"].as_bool(), row["largest_batch"].as_u64()), (Some(false), Some(0)), "{row:#?}");
}

#[test]
fn no_way_ends_with_its_exit_code() {
    let arguments = ["fits", "llama-1b/config.json", "--card", "2GiB"];
    let (out, _) = with_config(&[&arguments[..], &["--techniques", "bf16_model,ckpt,sgd"]].concat(), 108);
    assert!(out.contains("does not train on 2GiB") && out.contains("\n  the least is "), "{out}");
    // One of the usual ways is not modelled for few tokens, and might fit.
    let (out, _) = with_config(&[&arguments[..], &["--context", "512"]].concat(), 109);
    assert!(
        out.contains("is not known to train on 2GiB") && out.contains("4-bit products of 512 tokens are not modelled"),
        "{out}"
    );
}

#[test]
fn one_way_can_be_asked_for() {
    let arguments =
        ["fits", "llama-1b/config.json", "--card", "80GiB", "--techniques", "bf16_model,lora:16", "--batch", "4"];
    let rows = rows(&with_config(&[&arguments[..], &["--context", "512", "--format", "json"]].concat(), 0).0);
    // As a rehearsal and the H200 have it (models_truth).
    assert_eq!((rows.len(), rows[0]["peak_allocated_bytes"].as_u64()), (1, Some(8_740_968_448)));
}

#[test]
fn wrong_models_are_refused() {
    for (arguments, reason) in [
        (
            &["fits", "llama-1b/config.json", "--card", "24GiB", "--optimizer", "lion"][..],
            "known are adamw, sgd, adam8bit, paged_adam8bit, paged_adam, fused, foreach_off",
        ),
        (&["fits", "checkerboard", "--card", "24GiB"], "'checkerboard' is not a model in training"),
        (&["fits", "llama-1b/confg.json", "--card", "24GiB"], "no such file; did you mean"),
        (&["fits", "llama-1b/config.json"], "--card"),
    ] {
        let (_, said) = with_config(arguments, 2);
        assert!(said.contains(reason), "{arguments:?}: {said}");
    }
}

#[test]
fn a_technique_that_is_not_modelled_is_not_guessed() {
    let arguments = ["fits", "llama-1b/config.json", "--card", "80GiB", "--techniques", "bf16_model,chunked_loss"];
    let (out, _) = with_config(&arguments, 109);
    assert!(out.contains("technique 'chunked_loss' is not modelled for this model; 'liger' fuses its loss"), "{out}");
}

#[test]
fn a_configuration_is_a_source() {
    let settings = ["--set", "batch=4", "--set", "context=512", "--set", "techniques=bf16_model", "--set", "steps=3"];
    let replay = ["replay", "llama-1b/config.json", "--strategy", "caching", "--format", "json"];
    let rows = rows(&with_config(&[&replay[..], &settings].concat(), 0).0);
    let peaks = ["peak_allocated_bytes", "peak_reserved_bytes"].map(|column| rows[0][column].as_u64());
    assert_eq!(peaks, [Some(14_230_018_048), Some(15_804_137_472)]);
    let (out, _) = with_config(&["inspect", "llama-1b/config.json", "--set", "steps=1"], 0);
    assert!(out.contains("llama-1b"), "{out}");
}
