//! `liboomph.so`, loaded by C and C++ programs as PyTorch loads it.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a panic is how a test reports a failure")]

mod library;

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use serde_json::Value;
use tempfile::TempDir;

/// A folder for the programs of one test.
struct ProgramFolder(TempDir);

impl ProgramFolder {
    /// `None` without a C compiler.
    #[expect(clippy::print_stderr, reason = "the output of the tests must show what was skipped and why")]
    fn open() -> Option<ProgramFolder> {
        if Command::new("cc").arg("--version").output().is_err() {
            eprintln!("skipped: there is no C compiler (cc)");
            return None;
        }
        Some(ProgramFolder(tempfile::tempdir().unwrap()))
    }

    fn compile(&self, flags: &[&str], source: &str, output: &Path) {
        let source = Path::new("tests/served").join(source);
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-w", "-pthread"]).arg(&source).args(flags).arg("-o").arg(output);
        let printed = compiler.output().unwrap();
        assert!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
    }
}

/// Runs a program over the library, on a simulated device.
fn run(program: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    Command::new(program)
        .arg(library::liboomph())
        .args(arguments)
        .env("OOMPH_DEVICE", "sim")
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

#[test]
fn many_threads_and_streams_are_served() {
    let Some(folder) = ProgramFolder::open() else { return };
    let hammer = folder.0.path().join("hammer");
    folder.compile(&["-ldl"], "hammer.c", &hammer);
    for strategy in ["oomph", "caching", "caching:expandable_segments:True", "stitch", "async", "direct"] {
        let file = folder.0.path().join("statistics.json");
        let variables = [("OOMPH_STRATEGY", strategy), ("OOMPH_STATS", file.to_str().unwrap())];
        let output = run(&hammer, &["8", "3000"], &variables);
        let (printed, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && errors.is_empty(), "{strategy}: {printed} {errors}");
        let statistics: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        let device = &statistics["devices"][0];
        let stats = &device["stats"];
        assert!(printed.starts_with(&format!("served {} refused 0", stats["allocs"])), "{strategy}: {printed} {stats}");
        assert_eq!((statistics["strategy"].as_str(), &stats["allocs"]), (Some(strategy), &stats["frees"]));
        assert_eq!((stats["live_blocks"].as_u64(), stats["current"]["allocated"].as_u64()), (Some(0), Some(0)));
        assert_eq!(device["streams"], 10, "{strategy}: the default, one per thread and the shared one");
    }
}

#[test]
fn a_limit_is_kept_and_statistics_are_printed() {
    let Some(folder) = ProgramFolder::open() else { return };
    let hammer = folder.0.path().join("hammer");
    folder.compile(&["-ldl"], "hammer.c", &hammer);
    let limited = [("OOMPH_STRATEGY", "caching"), ("OOMPH_LIMIT", "16MiB")];
    let output = run(&hammer, &["4", "3000"], &limited);
    let (printed, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && !printed.contains("refused 0 "), "{printed} {errors}");
    assert!(errors.starts_with("oomph: caching on device 0 (") && errors.contains(" 0 live, "), "{errors}");
    // The peak varies, because the order of threads is random.
    let file = folder.0.path().join("statistics.json");
    run(&hammer, &["4", "3000"], &[&limited[..], &[("OOMPH_STATS", file.to_str().unwrap())]].concat());
    let statistics: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    let stats = &statistics["devices"][0]["stats"];
    assert!(stats["peak"]["reserved"].as_u64().unwrap() <= 16 << 20 && stats["ooms"].as_u64().unwrap() > 0, "{stats}");
}

#[test]
fn an_invalid_environment_is_explained() {
    let Some(folder) = ProgramFolder::open() else { return };
    let hammer = folder.0.path().join("hammer");
    folder.compile(&["-ldl"], "hammer.c", &hammer);
    let output = run(&hammer, &["1", "100"], &[("OOMPH_STRATEGY", "cachign")]);
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("served 0 "), "{output:?}");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(errors, "oomph: OOMPH_STRATEGY: unknown strategy 'cachign'; did you mean 'caching'?\n");
}

#[test]
fn without_a_gpu_the_reason_is_printed() {
    let Some(folder) = ProgramFolder::open() else { return };
    let hammer = folder.0.path().join("hammer");
    folder.compile(&["-ldl"], "hammer.c", &hammer);
    // Hides all GPUs, so that the test also works on a machine with one.
    let hidden = [("OOMPH_DEVICE", "cuda"), ("CUDA_VISIBLE_DEVICES", "")];
    let output = run(&hammer, &["1", "10"], &hidden);
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("served 0 "), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).starts_with("oomph: device 'cuda:0' is not available: "));
}

#[test]
fn out_of_memory_is_null_or_an_exception() {
    let Some(folder) = ProgramFolder::open() else { return };
    let catcher = folder.0.path().join("catcher");
    folder.compile(&["-lstdc++", "-ldl"], "catcher.cpp", &catcher);
    for (word, expected) in
        [("null", "null\nnull\nnull\na block\n"), ("throw", "bad_alloc\nbad_alloc\nbad_alloc\na block\n")]
    {
        let output = run(&catcher, &[], &[("OOMPH_STRATEGY", "caching"), ("OOMPH_OUT_OF_MEMORY", word)]);
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{output:?}");
    }
}

/// A pool's key and filter arrive as C++ passes them, and the filter is not called after the pool has ended.
#[test]
fn pools_are_named_and_filtered_as_in_cpp() {
    let Some(folder) = ProgramFolder::open() else { return };
    let graphs = folder.0.path().join("graphs");
    folder.compile(&["-std=c++17", "-lstdc++", "-ldl"], "graphs.cpp", &graphs);
    for strategy in ["oomph", "caching"] {
        let output = run(&graphs, &[], &[("OOMPH_STRATEGY", strategy)]);
        let line = "asked 2 after the end 0 kept 40 apart 1 left 0\n";
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            format!("serves 1\n{line}{line}"),
            "{strategy}: {output:?}"
        );
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(errors.contains("oomph: pool (3, 5) was not begun, or was released already\n"), "{errors}");
    }
    let output = run(&graphs, &[], &[("OOMPH_STRATEGY", "bfc")]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("serves 0\n"), "{output:?}");
    assert!(errors.contains("oomph: the strategy bfc serves no captured graphs; oomph and caching do\n"), "{errors}");
}
