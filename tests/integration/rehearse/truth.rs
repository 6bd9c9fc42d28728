//! Rehearsals of real PyTorch, where a wheel is at hand: `OOMPH_REHEARSE_TORCH` names its site folder, otherwise it is
//! `target/rehearse-site`, which `tools/shadow/site.sh` makes.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Output,
};

use tempfile::TempDir;

use crate::command::oomph;

/// A transformer block that trains: forward, backward, an optimizer.
const PROGRAM: &str = "\
import torch
model = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    loss = model(torch.randn(8, 128, 256, device='cuda')).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
";

/// The folder with a PyTorch wheel for CUDA, or `None` after the reason was printed.
pub(super) fn site() -> Option<PathBuf> {
    let made = || Path::new(env!("CARGO_MANIFEST_DIR")).join("target/rehearse-site");
    let site = env::var_os("OOMPH_REHEARSE_TORCH").map_or_else(made, PathBuf::from);
    if !site.join("torch/version.py").exists() {
        eprintln!("skipped: no PyTorch wheel for CUDA in {}; tools/shadow/site.sh downloads one", site.display());
        return None;
    }
    Some(site)
}

/// Runs a command in a rehearsal of real PyTorch, with the recordings in `out`.
pub(super) fn rehearse(folder: &Path, site: &Path, options: &[&str], words: &[&str]) -> Output {
    let mut command = oomph(folder);
    command.args(["rehearse", "--format", "json"]).args(options).arg("--").args(words);
    command.env("PYTHONPATH", site).output().unwrap()
}

/// A folder with the recordings of a command that succeeds, in `out`.
pub(super) fn rehearsed(words: &[&str]) -> Option<TempDir> {
    let folder = tempfile::tempdir().unwrap();
    let output = rehearse(folder.path(), &site()?, &["-o", "out"], words);
    let text = [&*output.stdout, &*output.stderr].map(String::from_utf8_lossy).concat();
    assert_eq!(output.status.code(), Some(0), "{words:?}\n{text}");
    Some(folder)
}

/// What PyTorch itself counted is what the answer says, and the model reproduces the recording.
#[test]
fn a_real_program_is_recorded_and_verified() {
    let Some(site) = site() else { return };
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("train.py"), PROGRAM).unwrap();
    let run = |options: &[&str]| rehearse(folder.path(), &site, options, &["python3", "train.py"]);
    let output = run(&["-o", "out"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let (own, answer) = text.split_once('\n').unwrap();
    let own: Vec<u64> = own.split(' ').map(|number| number.parse().unwrap()).collect();
    let answer: serde_json::Value = serde_json::from_str(answer).unwrap();
    let row = &answer["rows"][0];
    assert_eq!(row["peak_allocated_bytes"], own[0], "{row}");
    assert_eq!(row["peak_reserved_bytes"], own[1], "{row}");
    assert_eq!((&row["steps"], &row["verdict"]), (&6.into(), &"fits".into()));
    let verified = oomph(folder.path()).args(["verify", "out/rank-0.pickle"]).output().unwrap();
    let said = String::from_utf8_lossy(&verified.stdout);
    assert!(verified.status.success() && said.contains("EXACT"), "{said}");
    let limit = format!("{}B", own[1] - (2 << 20));
    assert_eq!(run(&["--limit", &limit, "-o", "small"]).status.code(), Some(108));
}
