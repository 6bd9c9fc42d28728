//! `oomph record`: the Python lines that make a recording.
//!
//! Nothing is run here: a recording is made inside the program that is recorded. The lines use PyTorch's own names, which
//! have changed once.

use anyhow::anyhow;
use clap::ValueEnum;

use super::{
    exit,
    failure::{Failure, Outcome},
    output,
};

/// Prints the few lines of Python that make PyTorch write a memory snapshot, which every command here reads.
///
/// Paste them at the top of the training script, before the first tensor is on the GPU: what was allocated before the
/// recording began is not in it.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph record                       all of a run, written when the program ends
  oomph record --when oom            written at the moment memory runs out
  oomph record --when oom --last 200000   as before, of the last 200,000 events only: for runs of days
  oomph record --torch 2.0           for an old PyTorch
  oomph record >> recording.py       then `import recording` first in the script

And then:
  oomph advise run-0.pickle          which allocator settings fit, and which line to paste
  oomph leaks run-0.pickle           whether it leaks, and what grows
  oomph verify run-0.pickle          whether the model does exactly what PyTorch did")]
pub struct Args {
    /// When the snapshot is written.
    #[arg(long, value_enum, default_value_t)]
    when: When,
    /// Keep only the last N events. Without, all are kept: about 100 bytes of host memory each, and more with stacks.
    #[arg(long, value_name = "N")]
    last: Option<u64>,
    /// Leave out where in the program memory was asked for: smaller and faster, but nobody can say who grows.
    #[arg(long)]
    no_stacks: bool,
    /// The PyTorch that will run it.
    #[arg(long, value_name = "VERSION", default_value = "2.11")]
    torch: String,
    /// The file's name, to which the rank and `.pickle` are added.
    #[arg(long, value_name = "NAME", default_value = "run")]
    name: String,
}

/// When a snapshot is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum When {
    /// When the program ends, by itself or by an exception.
    #[default]
    Exit,
    /// When an allocation fails for the first time.
    Oom,
}

pub fn run(args: &Args) -> Outcome {
    output::say(&script(args)?)?;
    Ok(exit::OK)
}

/// How PyTorch wants to be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Api {
    /// 2.0: a switch, and one entry of history unless told otherwise.
    First,
    /// From 2.1 on.
    Current,
}

impl Api {
    fn of(version: &str) -> Result<Api, Failure> {
        let mut parts = version.trim_start_matches('v').split(['.', '+']);
        let mut number = || parts.next().and_then(|part| part.parse::<u32>().ok());
        match (number(), number()) {
            (Some(2), Some(0)) => Ok(Api::First),
            (Some(2), Some(_)) | (Some(3..), _) => Ok(Api::Current),
            (Some(..2), _) => Err(Failure::usage(anyhow!(
                "--torch {version}: before PyTorch 2.0 there is no history to record; `oomph list workloads` has programs like \
                 yours"
            ))),
            _ => Err(Failure::usage(anyhow!("--torch {version}: write a version such as 2.11"))),
        }
    }
}

fn script(args: &Args) -> Result<String, Failure> {
    if args.name.contains(['"', '\\', '\n', '{', '}']) {
        return Err(Failure::usage(anyhow!("--name {}: quotes, braces and backslashes cannot be used", args.name)));
    }
    if args.last == Some(0) {
        return Err(Failure::usage(anyhow!("--last 0 would record nothing")));
    }
    let api = Api::of(&args.torch)?;
    let kept = match args.last {
        Some(last) => format!("the last {last} allocations and frees"),
        None => "all allocations and frees".to_owned(),
    };
    Ok(format!(
        "# Records {kept} of PyTorch on the GPU. Goes before the first line that uses it.\n\
         import {imports}\n\
         \n\
         import torch\n\
         \n\
         {begin}\n\
         {save}",
        imports = match args.when {
            When::Exit => "atexit\nimport os\nimport pickle",
            When::Oom => "os\nimport pickle",
        },
        begin = begin(args, api),
        save = save(args),
    ))
}

/// The call that switches history on.
fn begin(args: &Args, api: Api) -> String {
    let stacks = !args.no_stacks;
    let call = "torch.cuda.memory._record_memory_history";
    match api {
        Api::First => {
            let context = if stacks { "True" } else { "False" };
            let last = args.last.unwrap_or(100_000_000);
            format!(
                "{call}(\n    True, record_context={context}, trace_alloc_max_entries={last}, trace_alloc_record_context={context}\n)"
            )
        }
        Api::Current => {
            let context = if stacks { "stacks=\"python\"" } else { "context=None" };
            let last = args.last.map_or_else(String::new, |last| format!(", max_entries={last}"));
            format!("{call}({context}{last})")
        }
    }
}

/// The function that writes the file, and who calls it.
fn save(args: &Args) -> String {
    let name = &args.name;
    // Names of the function's own: the script that it is pasted into may well have a `rank`.
    let write = format!(
        "    names = (\"RANK\", \"SLURM_PROCID\", \"OMPI_COMM_WORLD_RANK\", \"PMI_RANK\")  # torchrun, srun, mpirun\n    \
         rank = next((os.environ[name] for name in names if name in os.environ), \"0\")\n    \
         with open(f\"{name}-{{rank}}.pickle\", \"wb\") as file:\n        \
         pickle.dump(torch.cuda.memory._snapshot(), file)"
    );
    match args.when {
        When::Exit => format!(
            "\n\ndef save_memory_snapshot():\n{write}\n\n\n\
             atexit.register(save_memory_snapshot)\n"
        ),
        When::Oom => format!(
            "saved = False\n\n\ndef save_memory_snapshot(device, requested, allocated, free):\n    global saved\n    \
             if saved:  # the first failure tells most\n        return\n    saved = True\n{write}\n\n\n\
             torch._C._cuda_attach_out_of_memory_observer(save_memory_snapshot)\n"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(when: When, last: Option<u64>, no_stacks: bool, torch: &str) -> Args {
        Args { when, last, no_stacks, torch: torch.to_owned(), name: "run".to_owned() }
    }

    #[test]
    fn the_lines_are_in_the_words_of_the_version() {
        let text = |torch| script(&args(When::Exit, Some(5), false, torch)).unwrap();
        assert!(text("2.11").contains("_record_memory_history(stacks=\"python\", max_entries=5)"));
        assert!(text("2.1.0+cu121").contains("max_entries=5)"));
        assert!(text("2.0.1").contains("trace_alloc_max_entries=5"));
    }

    #[test]
    fn an_oom_is_told_to_the_observer_and_an_end_to_atexit() {
        let oom = script(&args(When::Oom, None, true, "2.11")).unwrap();
        assert!(oom.contains("_cuda_attach_out_of_memory_observer(save_memory_snapshot)") && !oom.contains("atexit"));
        assert!(oom.contains("_record_memory_history(context=None)"));
        assert!(
            script(&args(When::Exit, None, true, "2.11")).unwrap().ends_with("atexit.register(save_memory_snapshot)\n")
        );
    }

    #[test]
    fn what_cannot_work_is_refused() {
        for torch in ["1.13", "two", ""] {
            assert!(script(&args(When::Exit, None, false, torch)).is_err(), "{torch}");
        }
        assert!(script(&args(When::Exit, Some(0), false, "2.11")).is_err());
        let name = Args { name: "a\"b".to_owned(), ..args(When::Exit, None, false, "2.11") };
        assert!(script(&name).is_err());
    }
}
