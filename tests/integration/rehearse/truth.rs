//! Rehearsals of real PyTorch, where a wheel is at hand: `OOMPH_REHEARSE_TORCH` names its site folder, otherwise it is
//! `target/rehearse-site`, which `tools/shadow/site.sh` makes.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use tempfile::TempDir;

use crate::command::oomph;

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

/// `oomph rehearse` for programs that import PyTorch from the site folder.
fn rehearsal(folder: &Path, site: &Path) -> Command {
    let mut command = oomph(folder);
    command.arg("rehearse").env("PYTHONPATH", site);
    command
}

/// Rehearses a command; the answer is JSON.
fn rehearse(folder: &Path, site: &Path, options: &[&str], words: &[&str]) -> Output {
    rehearsal(folder, site).args(["--format", "json"]).args(options).arg("--").args(words).output().unwrap()
}

/// A folder with the recordings of a command that succeeds, in `out`.
pub(super) fn rehearsed(words: &[&str]) -> Option<TempDir> {
    rehearsed_with(&[], words)
}

/// The same, with options of `oomph rehearse`.
pub(super) fn rehearsed_with(options: &[&str], words: &[&str]) -> Option<TempDir> {
    let folder = tempfile::tempdir().unwrap();
    let output = rehearse(folder.path(), &site()?, &[&["-o", "out"], options].concat(), words);
    let text = [&*output.stdout, &*output.stderr].map(String::from_utf8_lossy).concat();
    assert_eq!(output.status.code(), Some(0), "{words:?}\n{text}");
    Some(folder)
}

/// Masks, counts and flags whose values are known decide what the program does. The same is computed on the CPU.
const KNOWN_VALUES: &str = "\
import torch
def values(device):
    mask = torch.tensor([[1, 0, 1], [1, 1, 1]]).to(device)
    longer = torch.cat([mask, mask.new_ones((2, 1))], -1)
    index = torch.arange(512, device=device)
    chosen = (index < 300) & (index != 7)
    done = torch.full((4,), False, device=device) | (torch.arange(4, device=device) >= 2)
    yield mask.bool().all().item(), longer.sum().item(), longer.bool().sum(-1).tolist()
    yield torch.where(mask == 0, 1, 0).any().item(), torch.isin(mask, torch.tensor([0, 4]).to(device)).tolist()
    yield (1 - mask).max().item(), mask.masked_fill(mask == 0, 5).tolist(), mask.t().contiguous().tolist()
    yield torch.zeros(512, 2, device=device)[chosen].shape, (index[:5, None] >= index[None, :3]).tolist()
    yield (torch.ones(4, dtype=torch.long, device=device) & ~done).tolist(), done.any().item()
for host, gpu in zip(values('cpu'), values('cuda')):
    assert host == gpu, (host, gpu)
# Whether sequences are packed, as transformers finds out. Blocks are reused, and their old values must not be read.
for batch in 1, 2, 4, 8:
    for length in 16, 128, 512, 1000, 1024, 2048:
        positions = (torch.arange(length, device='cuda') + 0).unsqueeze(0).expand(batch, -1)
        steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
        packed = (steps != 1).cumsum(-1)
        assert (packed[:, -1] == 0).all(), (batch, length)
        known = batch * length * 8 <= 32768
        assert not known or steps[:, :3].tolist() == [[1, 1, 1]] * batch, (batch, length, steps[:, :3].tolist())
# What is not known stays unknown; a condition on it is false, and what is known decides.
noise = torch.randn(4, device='cuda')
assert not torch.isnan(noise).any()
assert (torch.ones(4, dtype=torch.bool, device='cuda') | (noise > 0)).all()
graph = torch.cuda.CUDAGraph()
static = torch.zeros(3, dtype=torch.long, device='cuda')
with torch.cuda.graph(graph):
    static += 1
static.copy_(torch.tensor([7, 7, 7]))
graph.replay()
assert static.tolist() != [7, 7, 7], 'a launch of the graph overwrites it'
";

#[test]
fn known_values_are_computed() {
    let Some(site) = site() else { return };
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("values.py"), KNOWN_VALUES).unwrap();
    let mut command = rehearsal(folder.path(), &site);
    let output = command.args(["-o", "out", "--", "python3", "values.py"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("conditions on values that were not computed are false"), "{text}");
}

/// A compiled function: the answer says what the cache contained, and the caches of a run are deleted.
#[test]
fn compiled_programs_have_a_cache_of_their_own() {
    let Some(site) = site() else { return };
    if !site.join("triton").exists() {
        eprintln!("skipped: Triton is not installed in {}", site.display());
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program =
        "import torch\nprint(torch.compile(lambda x: x.sin() + x.cos())(torch.ones(1 << 20, device='cuda')).shape)\n";
    fs::write(folder.path().join("compiled.py"), program).unwrap();
    let mut command = rehearsal(folder.path(), &site);
    command.args(["-o", "out", "--", "python3", "compiled.py"]);
    command.env("TORCHINDUCTOR_CACHE_DIR", folder.path().join("mine")).env_remove("TRITON_CACHE_DIR");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("torch.compile began with an empty cache, as "), "{text}");
    assert!(!folder.path().join("mine").exists());
}

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
    let Some(site) = site() else { return };
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("train.py"), PROGRAM).unwrap();
    let run = |options: &[&str]| rehearse(folder.path(), &site, options, &["python3", "train.py"]);
    let output = run(&["-o", "out"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{said}");
    // The program's line of two numbers, among the lines of progress.
    let own = said.lines().find_map(|line| {
        let numbers: Result<Vec<u64>, _> = line.split(' ').map(str::parse).collect();
        numbers.ok().filter(|numbers| numbers.len() == 2)
    });
    let own = own.unwrap();
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
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

/// FSDP2, with values that the ranks exchange.
const RANK_PROGRAM: &str = "\
import os, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
rank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
dist.init_process_group('nccl')
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.randn(64 * (rank + 1), 1024, device='cuda')).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
total = torch.tensor([rank + 1.0]).cuda()
dist.all_reduce(total)
ranks = torch.empty(world, dtype=torch.long, device='cuda')
dist.all_gather_into_tensor(ranks, torch.tensor([rank]).cuda())
objects = [None] * world
dist.all_gather_object(objects, 'x' * (rank + 1))
group = dist.new_group(backend='gloo')
host = torch.tensor([rank + 1.0])
dist.all_reduce(host, group=group)
print(total.item(), ranks.tolist(), objects, host.item())
if rank:
    dist.destroy_process_group()
";

/// A rank alone takes what it takes among the others, and values are exchanged where all ranks are there.
#[test]
fn a_rank_alone_takes_what_it_takes_among_all() {
    let Some(site) = site() else { return };
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("train.py"), RANK_PROGRAM).unwrap();
    let run = |options: &[&str]| {
        let output = rehearse(folder.path(), &site, options, &["python3", "train.py"]);
        // Standard output is for the answer: what the program prints is on standard error.
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{said}");
        let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        (said, answer["rows"][0].clone())
    };
    let (said, all) = run(&["--ranks", "3", "-o", "all"]);
    let exchanged = "6.0 [0, 1, 2] ['x', 'xx', 'xxx'] 6.0";
    assert!(said.contains(exchanged), "{said}");
    assert!(fs::read_to_string(folder.path().join("all/rank-2.log")).unwrap().contains(exchanged));
    let (said, alone) = run(&["--ranks", "3", "--rank", "2", "-o", "alone"]);
    assert!(said.contains("9.0 [2, 2, 2] ['xxx', 'xxx', 'xxx'] 9.0"), "{said}");
    assert_eq!(alone["peak_allocated_bytes"], all["ranks"][2]["allocated_bytes"]);
    assert_eq!(alone["peak_reserved_bytes"], all["ranks"][2]["reserved_bytes"]);
    assert!(all["ranks"][2]["allocated_bytes"].as_u64() > all["ranks"][0]["allocated_bytes"].as_u64(), "{all}");
    let assumed = |row: &serde_json::Value| row["assumptions"].to_string().contains("absent_ranks");
    assert_eq!((assumed(&all), assumed(&alone)), (false, true));
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
    let Some(site) = site() else { return };
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("train.py"), CONVOLUTION).unwrap();
    let mut command = rehearsal(folder.path(), &site);
    command.args(["-o", "out", "--", "python3", "train.py"]).env_remove("LD_LIBRARY_PATH");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let installed = env::split_paths(&site).any(|folder| folder.join("nvidia/cudnn/lib/libcudnn.so.9").exists());
    if installed {
        assert!(said.contains("come from the installed cuDNN") || said.contains("cannot know without a GPU"), "{said}");
    } else {
        eprintln!("skipped in part: no cuDNN lies in the site folder, so only its absence is tested");
        assert!(said.contains("not used here: "), "{said}");
    }
}
