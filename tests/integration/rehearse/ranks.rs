//! Ranks of a bigger world, with the stub of PyTorch.

use std::fs;

use super::{Scene, assert_refused, stderr, stdout};

/// Allocates 10 MiB more than the rank before, and says what a launcher told it.
const RANK_PROGRAM: &str = "\
import os, torch
names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'OOMPH_REHEARSE_WORLD')
print(*(os.environ[name] for name in names), flush=True)
torch.empty((int(os.environ['RANK']) + 1) * 10 << 20)
torch.optim.Optimizer().step()
";

#[test]
fn every_rank_is_a_process_and_the_largest_decides() {
    let Some(scene) = Scene::with_torch() else { return };
    scene.write("train.py", RANK_PROGRAM);
    let output = scene.run(&["--ranks", "3", "--card", "24GiB", "-o", "out"], &["python3", "train.py"]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}{}", stderr(&output));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "0 0 3 3 0 complete", "the output of rank 0 is passed through");
    assert!(lines[1].starts_with("fits on 24GiB") && lines[2].starts_with("peak         30.0 MiB allocated"), "{text}");
    assert_eq!(lines[4], "rank 0       10.0 MiB allocated, 10.0 MiB reserved", "{text}");
    assert_eq!(lines[6], "rank 2       30.0 MiB allocated, 30.0 MiB reserved", "{text}");
    assert_eq!(fs::read_to_string(scene.path("out/rank-2.log")).unwrap(), "2 2 3 3 0 complete\n");
    let left: Vec<String> = fs::read_dir(scene.path("out"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with('.'))
        .collect();
    assert_eq!(left, Vec::<String>::new(), "the exchange is removed");
    let output = scene.run(&["--ranks", "3", "--limit", "25MiB"], &["python3", "train.py"]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(108), "{text}{}", stderr(&output));
    assert!(text.contains("rank 2       0 B allocated, 0 B reserved, and ran out of memory"), "{text}");
}

#[test]
fn named_ranks_run_without_the_others() {
    let Some(scene) = Scene::with_torch() else { return };
    scene.write("train.py", RANK_PROGRAM);
    let output = scene.run(&["--ranks", "20", "--rank", "17,5", "-o", "out"], &["python3", "train.py"]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}{}", stderr(&output));
    assert!(text.starts_with("5 5 20 8 0 absent\n"), "the first rank that is started is passed through: {text}");
    assert_eq!(fs::read_to_string(scene.path("out/rank-17.log")).unwrap(), "17 1 20 4 2 absent\n");
    assert!(text.contains("rank 17      180 MiB allocated"), "{text}");
}

#[test]
fn a_rank_that_fails_is_shown_and_ends_the_others() {
    let Some(scene) = Scene::with_torch() else { return };
    let program = "import os, sys, time, torch\ntorch.empty(1)\n\
                   if os.environ['RANK'] == '1':\n    print('the reason')\n    sys.exit(7)\ntime.sleep(600)\n";
    scene.write("train.py", program);
    let output = scene.run(&["--ranks", "2", "-o", "out"], &["python3", "train.py"]);
    assert_eq!(output.status.code(), Some(7), "{}", stderr(&output));
    let said = stderr(&output);
    assert!(said.contains("rank 1 wrote") && said.contains("the reason"), "{said}");
    assert!(stdout(&output).contains("the program ended with exit code 7 in rank 1"), "{}", stdout(&output));
    assert!(scene.path("out/rank-0.pickle").exists(), "what was recorded until then is kept");
}

#[test]
fn worlds_that_cannot_be_are_refused() {
    let Some(scene) = Scene::with_torch() else { return };
    let run = |options: &[&str], words: &[&str]| scene.run(options, words);
    assert_refused(&run(&["--ranks", "2"], &["torchrun", "train.py"]), "'torchrun' starts ranks itself");
    let module = ["python3", "-m", "torch.distributed.run", "train.py"];
    assert_refused(&run(&["--ranks", "2"], &module), "'torch.distributed.run' starts ranks itself");
    let outside = run(&["--ranks", "2", "--rank", "2"], &["python3", "train.py"]);
    assert_refused(&outside, "--rank 2: the ranks of a world of 2 are 0 to 1");
    assert_eq!(run(&["--rank", "1"], &["python3", "train.py"]).status.code(), Some(2));
    assert_eq!(scene.left(), Vec::<String>::new());
}
