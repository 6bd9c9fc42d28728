//! The models by name, from the command line.

use crate::command::run;

/// Replays with these settings, checks the exit code, and returns standard output and standard error.
#[track_caller]
fn replay(workload: &str, settings: &[&str], code: i32) -> (String, String) {
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = vec!["replay", workload, "--strategy", "caching", "--format", "json"];
    arguments.extend(settings.iter().flat_map(|setting| ["--set", setting]));
    run(&folder, &arguments, code)
}

#[test]
fn model_size_and_techniques_set_the_peaks() {
    let settings = ["layers=36", "width=1280", "heads=20", "batch=4", "techniques=amp,ckpt"];
    let (out, _) = replay("reference-gpt-163m", &settings, 0);
    let rows: serde_json::Value = serde_json::from_str(&out).unwrap();
    let row = &rows["rows"][0];
    let (allocated, reserved) =
        (row["peak_allocated_bytes"].as_u64().unwrap(), row["peak_reserved_bytes"].as_u64().unwrap());
    // 838 million weights and their two moments take 10 GB, and nothing here doubles that.
    assert!((10_000_000_000..20_000_000_000).contains(&allocated), "{allocated}");
    assert!(reserved >= allocated && reserved < allocated * 3 / 2, "{reserved}");
}

#[test]
fn every_model_is_known_by_its_name() {
    for name in ["reference-gpt-163m", "reference-gpt-406m", "reference-gpt-1.4b", "reference-gpt-13b"] {
        replay(name, &["steps=1", "techniques=zero3:64,ckpt,amp"], 0);
    }
}

#[test]
fn impossible_models_are_refused_with_reason() {
    for (setting, reason) in [
        ("heads=20", "20 heads do not divide a width of 768"),
        ("batch=0", "'batch' takes a whole number from 1 to 4096, not 0"),
        ("techniques=sgd,adam8bit", "'sgd' and 'adam8bit' contradict: only one of them can be"),
        ("techniques=amp,chkpt", "'techniques' has no 'chkpt'; did you mean 'ckpt'?"),
        ("layer=3", "generator 'transformer' has no parameter 'layer'; did you mean 'layers'?"),
    ] {
        let (out, err) = replay("reference-gpt-163m", &[setting], 2);
        assert_eq!(out, "", "{setting}");
        assert!(err.contains(reason), "{setting}: {err}");
    }
}

#[test]
fn older_names_are_accepted_with_one_note() {
    let small = ["layers=2", "batch=2", "steps=2"];
    let peak = |setting: &str| {
        let (out, err) = replay("reference-gpt-163m", &[small.as_slice(), &[setting]].concat(), 0);
        let rows: serde_json::Value = serde_json::from_str(&out).unwrap();
        (rows["rows"][0]["peak_allocated_bytes"].as_u64().unwrap(), err)
    };
    for (older, newer) in [
        ("precision=amp", "techniques=amp"),
        ("optimizer=sgd", "techniques=sgd"),
        ("techniques=bf16_model,master_weights", "techniques=bf16_master"),
    ] {
        let ((peak_older, err), (peak_newer, silence)) = (peak(older), peak(newer));
        assert_eq!(peak_older, peak_newer, "{older}");
        let note = format!("'{older}' is an older name; write {newer}");
        assert_eq!(err.matches(&note).count(), 1, "{err}");
        assert!(!silence.contains("older name"), "{silence}");
    }
    let folder = tempfile::tempdir().unwrap();
    let (listed, _) = run(&folder, &["list", "generators", "--long"], 0);
    assert!(listed.contains("bf16_master") && !listed.contains("one of adamw"), "hidden: {listed}");
}

#[test]
fn techniques_are_added_to_what_is_set() {
    let folder = tempfile::tempdir().unwrap();
    let small = ["--set", "layers=4", "--set", "batch=4", "--no-cards"];
    let table = |settings: &[&str]| {
        let arguments = ["techniques", "--model", "reference-gpt-163m", "--technique", "ckpt", "--technique", "fp16"];
        run(&folder, &[arguments.as_slice(), &small, settings].concat(), 0).0
    };
    let text = table(&["--set", "techniques=amp"]);
    assert!(text.contains("base: amp, layers=4, batch=4"), "{text}");
    assert!(text.contains("'amp' and 'fp16' contradict: only one of them can be set"), "{text}");
    let json: serde_json::Value =
        serde_json::from_str(&table(&["--set", "techniques=amp", "--format", "json"])).unwrap();
    let ckpt = json["rows"].as_array().unwrap().iter().find(|row| row["technique"] == "ckpt").unwrap();
    assert_eq!((&ckpt["base_settings"], &ckpt["numerics"]), (&"amp, layers=4, batch=4".into(), &"same".into()));
    assert!(ckpt["step_ratio"].as_f64().unwrap() < 1.5, "{ckpt:#}");
}

#[test]
fn recommendation_keeps_the_numerics_and_names_the_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let small = ["--set", "layers=4", "--set", "batch=4", "--card", "8GiB"];
    let techniques = ["techniques", "--model", "reference-gpt-163m", "--technique", "bf16_model", "--technique", "amp"];
    let (text, _) = run(&folder, &[techniques.as_slice(), &small].concat(), 0);
    let advice = text.lines().find(|line| line.starts_with("reference-gpt-163m: ")).unwrap();
    let order =
        ["no technique is needed", "`amp`", "which changes rounding", "an NVIDIA H200 (simulated) with 8.00 GiB"];
    let places = order.map(|part| advice.find(part).unwrap_or_else(|| panic!("{part}: {advice}")));
    assert!(places.is_sorted(), "{advice}");
    if let Some(place) = advice.find("`bf16_model`") {
        assert!(advice[place..].contains("which can change the training result"), "{advice}");
    }
}
