//! Rehearsals of real PyTorch, where a wheel is at hand: `OOMPH_REHEARSE_TORCH` names its site folder.

use std::{env, fs, path::Path};

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

/// What PyTorch itself counted is what the answer says, and the model reproduces the recording.
#[test]
fn a_real_program_is_recorded_and_verified() {
    let Ok(site) = env::var("OOMPH_REHEARSE_TORCH") else {
        eprintln!("skipped: OOMPH_REHEARSE_TORCH does not name a site folder with a PyTorch wheel for CUDA");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("train.py"), PROGRAM).unwrap();
    let run = |options: &[&str]| {
        let mut command = oomph(folder.path());
        command.args(["rehearse", "--format", "json"]).args(options).args(["--", "python3", "train.py"]);
        command.env("PYTHONPATH", Path::new(&site)).output().unwrap()
    };
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

/// A convolution that trains.
const CONVOLUTION: &str = "\
import torch
model = torch.nn.Conv2d(64, 64, 3, padding=1).cuda()
model(torch.randn(4, 64, 32, 32, device='cuda')).sum().backward()
";

/// With cuDNN beside PyTorch its own answer is used, and without it the reason is said.
#[test]
fn the_installed_cudnn_answers_for_convolutions() {
    let Ok(site) = env::var("OOMPH_REHEARSE_TORCH") else {
        eprintln!("skipped: OOMPH_REHEARSE_TORCH does not name a site folder with a PyTorch wheel for CUDA");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("train.py"), CONVOLUTION).unwrap();
    let mut command = oomph(folder.path());
    command.args(["rehearse", "-o", "out", "--", "python3", "train.py"]).env_remove("LD_LIBRARY_PATH");
    let output = command.env("PYTHONPATH", Path::new(&site)).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let installed = env::split_paths(&site).any(|folder| folder.join("nvidia/cudnn/lib/libcudnn.so.9").exists());
    if installed {
        assert!(said.contains("come from the installed cuDNN") || said.contains("cannot know without a GPU"), "{said}");
    } else {
        eprintln!("skipped in part: no cuDNN lies in the site folder, so only its absence is tested");
        assert!(said.contains("here not: "), "{said}");
    }
}
