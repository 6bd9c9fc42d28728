//! PyTorch's own allocator loaded as a plugin, over the simulated device.

use std::{fs, path::Path, process::Command};

use serde_json::Value;

use super::{PluginFixture, plugin, say};

/// The plugin; `None` if the oracle, whose libraries it needs, is not built.
fn native() -> Option<String> {
    let oracle = std::env::var("OOMPH_TORCH_ORACLE").unwrap_or_else(|_| "target/torch-oracle/oracle".to_owned());
    if !Path::new(&oracle).exists() {
        say("skipped: the torch oracle is not built (tools/torch-oracle/build.sh, or set OOMPH_TORCH_ORACLE)");
        return None;
    }
    let library = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/torch-plugin/native.so");
    // Compiling PyTorch's headers takes half a minute.
    let age = |path: &Path| fs::metadata(path).and_then(|data| data.modified()).ok();
    if age(&library) < age(Path::new("tools/torch-plugin/native.cpp")) {
        let built = Command::new("tools/torch-plugin/build.sh").arg("--oracle").arg(&library).output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    }
    Some(plugin(&library))
}

#[test]
fn real_allocator_reserves_as_caching() {
    let Some(fixture) = PluginFixture::open() else { return };
    let Some(native) = native() else { return };
    for (workload, settings) in [
        ("reference-gpt-163m", ""),
        ("reference-gpt-163m", "expandable_segments:True"),
        ("variable-length", "max_split_size_mb:64"),
        ("streams", ""),
    ] {
        let ours = if settings.is_empty() { "caching".to_owned() } else { format!("caching:{settings}") };
        let arguments = ["replay", workload, "--strategy", &ours, "--strategy", &native, "--format", "json"];
        let output = fixture.command(&arguments).env("PYTORCH_CUDA_ALLOC_CONF", settings).output().unwrap();
        let document: Value = serde_json::from_slice(&output.stdout).unwrap();
        let [caching, real] = [&document["rows"][0], &document["rows"][1]];
        assert_eq!(real["status"], "completed", "{real}");
        for column in [
            "allocs",
            "peak_reserved_bytes",
            "final_reserved_bytes",
            "peak_device_used_bytes",
            "driver_calls",
            "driver_ns",
        ] {
            assert_eq!(real[column], caching[column], "{workload} {settings}: {column}");
        }
    }
}

#[test]
fn real_allocator_ooms_as_caching() {
    let Some(fixture) = PluginFixture::open() else { return };
    let Some(native) = native() else { return };
    for workload in ["reference-gpt-163m", "variable-length"] {
        let strategies = ["replay", workload, "--strategy", "caching", "--strategy", &native];
        let output = fixture.oomph(&[&strategies[..], &["--limit", "6GiB", "--format", "json"]].concat());
        let document: Value = serde_json::from_slice(&output.stdout).unwrap();
        let [caching, real] = [&document["rows"][0], &document["rows"][1]];
        assert_eq!(real["status"], "oom", "{real}");
        for column in ["oom_event", "peak_reserved_bytes", "peak_device_used_bytes"] {
            assert_eq!(real[column], caching[column], "{workload}: {column}");
        }
    }
}
