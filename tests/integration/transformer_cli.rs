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
    let (out, _) = replay("gpt-124m", &settings, 0);
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
    for name in ["gpt-124m", "gpt-355m", "gpt-1.3b", "gpt-13b"] {
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
        let (out, err) = replay("gpt-124m", &[setting], 2);
        assert_eq!(out, "", "{setting}");
        assert!(err.contains(reason), "{setting}: {err}");
    }
}
