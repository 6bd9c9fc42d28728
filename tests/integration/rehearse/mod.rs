//! `oomph rehearse`, with a stub of PyTorch that needs `libcudart.so.13`: libraries are written, loaded and called for real.

mod fsdp;
mod generators;
mod ranks;
mod sequence;
mod truth;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use oomph::rehearse::SUPPORTED;
use oomph_shadow::forwarder::{CORE_SONAME, ForwarderPlan, NeededFunctions};
use tempfile::TempDir;

use crate::command::{oomph, wait_until, with_default_signals};

const STUB: &str = include_str!("stub_torch.py");
/// Allocates argv[1] MiB in each of argv[2] steps, and prints.
const PROGRAM: &str = "\
import sys, torch
optimizer = torch.optim.Optimizer()
for step in range(int(sys.argv[2])):
    torch.empty(int(sys.argv[1]) << 20)
    optimizer.step()
print('the program ends')
";

/// A folder with a program and packages, or `None` with the reason where rehearsals cannot run.
struct Scene {
    folder: TempDir,
}

impl Scene {
    fn new() -> Option<Scene> {
        if !SUPPORTED || Command::new("python3").arg("--version").output().is_err() {
            eprintln!("skipped: rehearsals need Linux on x86-64 and python3");
            return None;
        }
        let scene = Scene { folder: tempfile::tempdir().unwrap() };
        scene.write("train.py", PROGRAM);
        Some(scene)
    }

    fn with_torch() -> Option<Scene> {
        let scene = Scene::new()?;
        scene.write("site/torch/__init__.py", STUB);
        scene.write("site/torch/version.py", "cuda = '13.0'\n");
        fs::create_dir_all(scene.path("site/torch/lib")).unwrap();
        fs::write(scene.path("site/torch/lib/libtorch_cuda.so"), library_that_needs("libcudart.so.13")).unwrap();
        Some(scene)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        fs::write(self.path(name), text).unwrap();
    }

    fn command(&self, options: &[&str], words: &[&str]) -> Command {
        let mut command = oomph(self.folder.path());
        command.arg("rehearse").args(options).arg("--").args(words);
        command.env("PYTHONPATH", self.path("site")).env("XDG_CACHE_HOME", self.path("cache"));
        command.env("PYTHONDONTWRITEBYTECODE", "1").env_remove("RANK");
        command
    }

    fn run(&self, options: &[&str], words: &[&str]) -> Output {
        self.command(options, words).output().unwrap()
    }

    /// What lies in the folder besides what was there before.
    fn left(&self) -> Vec<String> {
        let names =
            fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| !["train.py", "site", "cache"].contains(&name.as_str())).collect()
    }
}

/// A library with one entry in its list of needed files.
fn library_that_needs(soname: &str) -> Vec<u8> {
    let mut library = ForwarderPlan::new("libtorch_cuda.so", &NeededFunctions::new(), []).write().unwrap();
    let place = library.windows(CORE_SONAME.len()).position(|bytes| bytes == CORE_SONAME.as_bytes()).unwrap();
    library[place..place + CORE_SONAME.len()].fill(0);
    library[place..place + soname.len()].copy_from_slice(soname.as_bytes());
    library
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
fn assert_refused(output: &Output, sentence: &str) {
    let said = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains(sentence), "{said}");
    assert_eq!(said.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{said}");
}

#[test]
fn a_program_that_fits_answers_in_three_lines() {
    let Some(scene) = Scene::with_torch() else { return };
    let output = scene.run(&["--card", "24GiB", "-o", "out"], &["python3", "train.py", "100", "3"]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}{}", stderr(&output));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "the program ends", "the program's own output is unchanged");
    assert!(lines[1].starts_with("fits on 24GiB (24.0 GiB): "), "{text}");
    assert!(lines[2].starts_with("peak         300 MiB allocated, 300 MiB reserved, "), "{text}");
    assert_eq!(lines[3], "recording    out/rank-0.pickle; next: oomph advise out/rank-0.pickle --card 24GiB");
    assert!(text.contains("held most at the peak\n     300 MiB  "), "{text}");
    let mut inside: Vec<String> = fs::read_dir(scene.path("out"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    inside.sort();
    assert_eq!(inside, ["rank-0.json", "rank-0.pickle"], "nothing else is left");
    let inspected = oomph(scene.folder.path()).args(["inspect", "out/rank-0.pickle"]).output().unwrap();
    assert!(stdout(&inspected).contains("peak live    300 MiB in 3 blocks"), "{}", stdout(&inspected));
}

#[test]
fn a_program_that_runs_out_names_step_and_line() {
    let Some(scene) = Scene::with_torch() else { return };
    let output = scene.run(&["--card", "2GiB", "-o", "out"], &["python3", "train.py", "600", "9"]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(108), "{text}{}", stderr(&output));
    assert!(
        text.starts_with("does not fit on 2GiB (2.00 GiB): out of memory in step 3, with 1.17 GiB allocated"),
        "{text}"
    );
    assert!(text.contains("runs out     at ") && text.contains("train.py:4 <module>"), "{text}");
    assert!(stderr(&output).contains("OutOfMemoryError: CUDA out of memory."), "the program's own error is shown");
}

#[test]
fn a_limit_is_the_memory_fraction_of_pytorch() {
    let Some(scene) = Scene::with_torch() else { return };
    let run = |limit: &str| scene.run(&["--limit", limit], &["python3", "train.py", "100", "3"]).status.code();
    assert_eq!(run("300MiB"), Some(0), "exactly as much as it needs");
    assert_eq!(run("299MiB"), Some(108));
}

#[test]
fn steps_end_the_program() {
    let Some(scene) = Scene::with_torch() else { return };
    let output = scene.run(&["--steps", "2"], &["python3", "train.py", "100", "50"]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}{}", stderr(&output));
    assert!(text.contains("200 MiB allocated") && text.contains("2 steps in"), "{text}");
    assert!(text.contains("the peaks rose in the last one"), "{text}");
    assert!(!text.contains("the program ends"));
}

#[test]
fn several_cards_run_one_after_the_other() {
    let Some(scene) = Scene::with_torch() else { return };
    let output = scene.run(&["--card", "1GiB,24GiB,rtx4090", "-o", "out"], &["python3", "train.py", "400", "2"]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(108), "{text}{}", stderr(&output));
    assert!(text.contains("fits in 2 of 3 cases: 24GiB, rtx4090\n"), "{text}");
    for card in ["1GiB", "24GiB", "rtx4090"] {
        assert!(scene.path(&format!("out/{card}/rank-0.pickle")).exists(), "{card}");
    }
    let output = scene.run(&["--card", "rtx4090"], &["python3", "train.py", "4", "1"]);
    assert!(stdout(&output).contains("neither was measured"), "{}", stdout(&output));
}

#[test]
fn the_largest_value_is_found_and_only_its_recording_is_kept() {
    let Some(scene) = Scene::with_torch() else { return };
    let options = ["--card", "2GiB", "--largest", "batch=1..64", "-o", "out"];
    let output = scene.run(&options, &["python3", "train.py", "{batch}00", "2"]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}{}", stderr(&output));
    assert!(text.contains("fits with batch=7, the largest value that fits, on 2GiB"), "{text}");
    let kept: Vec<String> = fs::read_dir(scene.path("out"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(kept, ["batch-7"]);
    let unused = scene.run(&["--largest", "lr=1..4"], &["python3", "train.py"]);
    assert_refused(&unused, "the command does not contain {lr}");
}

#[test]
fn variants_are_compared() {
    let Some(scene) = Scene::with_torch() else { return };
    let output = scene
        .run(&["--card", "1GiB", "--try", "100 2", "--try", "400 2"], &["python3", "train.py", "{try}", "50", "1"]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(108), "{text}{}", stderr(&output));
    assert!(text.contains("fits in 2 of 3 cases"), "{text}");
    assert!(text.contains("as it is") && text.contains("400 2"), "{text}");
}

#[test]
fn the_failure_of_the_program_is_its_own() {
    let Some(scene) = Scene::with_torch() else { return };
    scene.write("train.py", "import torch, sys\ntorch.empty(1)\nsys.exit(7)\n");
    let output = scene.run(&["-o", "out"], &["python3", "train.py"]);
    assert_eq!(output.status.code(), Some(7), "{}", stderr(&output));
    assert!(stdout(&output).starts_with("not known for h200"), "{}", stdout(&output));
    scene.write("train.py", "raise SystemExit(3)\n");
    let output = scene.run(&["-o", "early"], &["python3", "train.py"]);
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    assert!(!scene.path("early").exists(), "nothing is left behind");
}

#[test]
fn what_cannot_be_rehearsed_is_refused_in_a_sentence() {
    let Some(scene) = Scene::new() else { return };
    let run = |words: &[&str]| scene.run(&[], words);
    assert_refused(&run(&["python3", "train.py"]), "PyTorch is not installed for ");
    assert_refused(&run(&["python3", "-c", "pass"]), "without importing PyTorch");
    assert_refused(&run(&["sh", "-c", "exit 0"]), "ran no Python program that could be rehearsed");
    assert_refused(&run(&["python3", "-I", "-c", "pass"]), "Python with -I, -E or -S");
    assert_refused(&run(&["no-such-program"]), "cannot start 'no-such-program'");
    scene.write("site/torch/__init__.py", "");
    fs::create_dir_all(scene.path("site/torch/lib")).unwrap();
    assert_refused(&run(&["python3", "train.py"]), "is built without CUDA");
    assert_eq!(scene.left(), Vec::<String>::new(), "nothing is left behind");
    let wrong = scene.run(&["--card", "rtx409"], &["python3", "train.py"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(stderr(&wrong).contains("did you mean 'rtx4090'?"), "{}", stderr(&wrong));
}

#[test]
fn a_program_without_a_gpu_is_named() {
    let Some(scene) = Scene::with_torch() else { return };
    assert_refused(&scene.run(&[], &["python3", "-c", "import torch"]), "without using a GPU");
    assert_eq!(scene.left(), Vec::<String>::new());
}

#[test]
fn a_program_that_hangs_is_ended_with_its_line_and_recording() {
    let Some(scene) = Scene::with_torch() else { return };
    scene.write("train.py", "import time, torch\ntorch.empty(1)\nwhile True:\n    time.sleep(0.05)\n");
    let output = scene.run(&["--timeout", "2s", "-o", "out"], &["python3", "train.py"]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(104), "{text}{}", stderr(&output));
    assert!(text.contains("did not end in time; it was at ") && text.contains("train.py:4 <module>"), "{text}");
    assert!(scene.path("out/rank-0.pickle").exists());
}

/// A program that waits after its first step, and `oomph` with a folder of its own for temporary files.
fn waiting_program(scene: &Scene) -> Child {
    let program = "import time, torch\ntorch.empty(1)\ntorch.optim.Optimizer().step()\nopen('stepped', 'w').close()\n\
                   time.sleep(60)\n";
    scene.write("train.py", program);
    fs::create_dir(scene.path("temporary")).unwrap();
    let mut command = with_default_signals(&scene.command(&["-o", "out"], &["python3", "train.py"]));
    command.env("TMPDIR", scene.path("temporary")).stdout(Stdio::piped()).stderr(Stdio::piped());
    let running = command.spawn().unwrap();
    wait_until("the first step", || fs::metadata(scene.path("stepped")).ok());
    assert_eq!(fs::read_dir(scene.path("temporary")).unwrap().count(), 1);
    running
}

fn interrupt(running: &Child) {
    let sent = Command::new("kill").args(["-INT", &running.id().to_string()]).status().unwrap();
    assert!(sent.success());
}

#[test]
fn an_interrupted_program_keeps_its_recording() {
    let Some(scene) = Scene::with_torch() else { return };
    let running = waiting_program(&scene);
    interrupt(&running);
    let output = running.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(stdout(&output).contains("the program was interrupted"), "{}", stdout(&output));
    assert!(scene.path("out/rank-0.pickle").exists());
    assert_eq!(fs::read_dir(scene.path("temporary")).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn a_second_interrupt_ends_it_at_once_and_leaves_nothing() {
    let Some(scene) = Scene::with_torch() else { return };
    let mut running = waiting_program(&scene);
    interrupt(&running);
    // Two signals that come together are one.
    std::thread::sleep(std::time::Duration::from_millis(300));
    interrupt(&running);
    assert_eq!(running.wait().unwrap().code(), Some(130));
    assert_eq!(fs::read_dir(scene.path("temporary")).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn an_existing_sitecustomize_runs_and_forks_do_not_write() {
    let Some(scene) = Scene::with_torch() else { return };
    scene.write("site/sitecustomize.py", "print('mine ran')\n");
    let program =
        "import os, torch\ntorch.empty(1)\npid = os.fork()\nif pid == 0: raise SystemExit(0)\nos.waitpid(pid, 0)\n";
    scene.write("train.py", program);
    let output = scene.run(&["-o", "out"], &["python3", "train.py"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).starts_with("mine ran\n"), "{}", stdout(&output));
    assert_eq!(fs::read_dir(scene.path("out")).unwrap().count(), 2, "one recording and its facts");
}

#[test]
fn every_rank_has_its_recording() {
    let Some(scene) = Scene::with_torch() else { return };
    let script = "RANK=0 python3 train.py 10 1 && RANK=1 python3 train.py 30 1";
    let output = scene.run(&["-o", "out"], &["sh", "-c", script]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}{}", stderr(&output));
    assert!(text.contains("30.0 MiB allocated") && text.contains("by the rank that reserved most of 2"), "{text}");
    assert!(text.contains("next: oomph advise out --card"), "{text}");
    assert!(Path::new(&scene.path("out/rank-1.pickle")).exists());
}

#[test]
fn a_folder_with_files_is_not_mixed_up() {
    let Some(scene) = Scene::with_torch() else { return };
    scene.write("out/mine.txt", "");
    assert_refused(&scene.run(&["-o", "out"], &["python3", "train.py", "1", "1"]), "out: the folder is not empty");
}
