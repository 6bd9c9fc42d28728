//! `oomph record`: the Python lines that make a recording.
//!
//! Nothing runs here: a program records itself. The lines use PyTorch's own functions, whose names
//! changed in 2.1.

use anyhow::anyhow;
use clap::ValueEnum;

use super::{
    exit::{self, CommandError, CommandResult},
    output,
};
use crate::base::escaped_lines;

/// Prints the Python lines that make PyTorch write a memory snapshot, which all other commands
/// read.
///
/// Paste them at the top of the training script, before the first tensor is on the GPU: earlier
/// allocations are not in the recording. With the Python package nothing is pasted: `python -m oomph record train.py`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  oomph record                       the whole run, written when the program ends
  oomph record --when oom            written when memory runs out
  oomph record --when oom --last 200000   only the last 200,000 events: for long runs
  oomph record --torch 2.0           for an old PyTorch
  oomph record >> recording.py       then `import recording` first in the script

And then:
  oomph advise run-0.pickle          the allocator settings to use, as a line to paste
  oomph leaks run-0.pickle           whether it leaks, and what grows
  oomph verify run-0.pickle          whether the model reproduces PyTorch exactly")]
pub struct Args {
    /// A program: it is not run here, and the error says what runs it.
    #[arg(hide = true, trailing_var_arg = true)]
    program: Vec<String>,
    /// A module as the program, as in `python -m`: it is not run here either.
    #[arg(short, value_name = "MODULE", hide = true, num_args = 1.., allow_hyphen_values = true)]
    module: Vec<String>,
    /// When the snapshot is written.
    #[arg(long, value_enum, default_value_t)]
    when: RecordTrigger,
    /// Keep only the last N events [default: all, about 100 bytes of host memory each, more with
    /// stacks].
    #[arg(long, value_name = "N")]
    last: Option<u64>,
    /// Leave out Python stacks: smaller and faster, but call sites are unknown.
    #[arg(long)]
    no_stacks: bool,
    /// The PyTorch version of the program.
    #[arg(long, value_name = "VERSION", default_value = "2.11")]
    torch: String,
    /// The file's name, to which the rank and `.pickle` are added.
    #[arg(long, value_name = "NAME", default_value = "run")]
    name: String,
}

/// When the snapshot is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum RecordTrigger {
    /// When the program ends, by itself or by an exception.
    #[default]
    Exit,
    /// When an allocation fails for the first time.
    Oom,
}

pub fn run(args: &Args) -> CommandResult {
    let module = ["-m".to_owned()].into_iter().filter(|_| !args.module.is_empty()).chain(args.module.clone());
    let program: Vec<String> = module.chain(args.program.clone()).collect();
    if !program.is_empty() {
        return Err(CommandError::usage(anyhow!(
            "the Python package records programs: python -m oomph record {} (pip install oomph); without it, `oomph record` \
             prints the lines to paste",
            program.join(" ")
        )));
    }
    output::say_data(&escaped_lines(&script(args)?))?;
    Ok(exit::OK)
}

/// Whether a version has the history functions of PyTorch 2.0: a switch, with one entry of history by
/// default. They changed in 2.1.
fn has_first_api(version: &str) -> Result<bool, CommandError> {
    let mut parts = version.trim_start_matches('v').split(['.', '+']);
    let mut number = || parts.next().and_then(|part| part.parse::<u32>().ok());
    match (number(), number()) {
        (Some(2), Some(minor)) => Ok(minor == 0),
        (Some(3..), _) => Ok(false),
        (Some(..2), _) => Err(CommandError::usage(anyhow!(
            "--torch {version}: PyTorch before 2.0 cannot record a history; `oomph list workloads` has similar programs"
        ))),
        _ => Err(CommandError::usage(anyhow!("--torch {version}: write a version such as 2.11"))),
    }
}

fn script(args: &Args) -> Result<String, CommandError> {
    if args.name.contains(['"', '\\', '\n', '{', '}']) {
        return Err(CommandError::usage(anyhow!(
            "--name {}: quotes, braces and backslashes are not allowed",
            args.name
        )));
    }
    if args.last == Some(0) {
        return Err(CommandError::usage(anyhow!("--last 0 would record nothing")));
    }
    let first_api = has_first_api(&args.torch)?;
    let kept = match args.last {
        Some(last) => format!("the last {last} allocations and frees"),
        None => "all allocations and frees".to_owned(),
    };
    Ok(format!(
        "# Records {kept} of PyTorch on the GPU. Put this before the first use of the GPU.\n\
         import {imports}\n\
         \n\
         import torch\n\
         \n\
         {begin}\n\
         {save}",
        imports = match args.when {
            RecordTrigger::Exit => "atexit\nimport os\nimport pickle",
            RecordTrigger::Oom => "os\nimport pickle",
        },
        begin = begin(args, first_api),
        save = save(args),
    ))
}

/// The call that enables the history.
fn begin(args: &Args, first_api: bool) -> String {
    let call = "torch.cuda.memory._record_memory_history";
    if first_api {
        let context = if args.no_stacks { "False" } else { "True" };
        let last = args.last.unwrap_or(100_000_000);
        return format!(
            "{call}(\n    True, record_context={context}, trace_alloc_max_entries={last}, trace_alloc_record_context={context}\n)"
        );
    }
    // With the stacks of frees, PyTorch 2.10 and later end programs that checkpoint blocks with dropout
    // (pytorch/pytorch#179536).
    let context = if args.no_stacks { "context=None" } else { "context=\"alloc\", stacks=\"python\"" };
    let last = args.last.map_or_else(String::new, |last| format!(", max_entries={last}"));
    format!("{call}({context}{last})")
}

/// The function that writes the file, and its registration.
fn save(args: &Args) -> String {
    let name = &args.name;
    // Local names: the script may have a `rank` of its own.
    let write = format!(
        "    names = (\"RANK\", \"SLURM_PROCID\", \"OMPI_COMM_WORLD_RANK\", \"PMI_RANK\")  # torchrun, srun, mpirun\n    \
         rank = next((os.environ[name] for name in names if name in os.environ), \"0\")\n    \
         with open(f\"{name}-{{rank}}.pickle\", \"wb\") as file:\n        \
         pickle.dump(torch.cuda.memory._snapshot(), file)"
    );
    match args.when {
        RecordTrigger::Exit => format!(
            "\n\ndef save_memory_snapshot():\n{write}\n\n\n\
             atexit.register(save_memory_snapshot)\n"
        ),
        RecordTrigger::Oom => format!(
            "saved = False\n\n\ndef save_memory_snapshot(device, requested, allocated, free):\n    global saved\n    \
             if saved:  # the first failure matters most\n        return\n    saved = True\n{write}\n\n\n\
             torch._C._cuda_attach_out_of_memory_observer(save_memory_snapshot)\n"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(when: RecordTrigger, last: Option<u64>, no_stacks: bool, torch: &str) -> Args {
        Args {
            program: Vec::new(),
            module: Vec::new(),
            when,
            last,
            no_stacks,
            torch: torch.to_owned(),
            name: "run".to_owned(),
        }
    }

    #[test]
    fn lines_fit_the_version() {
        let text = |torch| script(&args(RecordTrigger::Exit, Some(5), false, torch)).unwrap();
        assert!(text("2.11").contains("_record_memory_history(context=\"alloc\", stacks=\"python\", max_entries=5)"));
        assert!(text("2.1.0+cu121").contains("max_entries=5)"));
        assert!(text("2.0.1").contains("trace_alloc_max_entries=5"));
    }

    #[test]
    fn trigger_chooses_observer_or_atexit() {
        let oom = script(&args(RecordTrigger::Oom, None, true, "2.11")).unwrap();
        assert!(oom.contains("_cuda_attach_out_of_memory_observer(save_memory_snapshot)") && !oom.contains("atexit"));
        assert!(oom.contains("_record_memory_history(context=None)"));
        assert!(
            script(&args(RecordTrigger::Exit, None, true, "2.11"))
                .unwrap()
                .ends_with("atexit.register(save_memory_snapshot)\n")
        );
    }

    #[test]
    fn invalid_options_are_refused() {
        for torch in ["1.13", "two", ""] {
            assert!(script(&args(RecordTrigger::Exit, None, false, torch)).is_err(), "{torch}");
        }
        assert!(script(&args(RecordTrigger::Exit, Some(0), false, "2.11")).is_err());
        let name = Args { name: "a\"b".to_owned(), ..args(RecordTrigger::Exit, None, false, "2.11") };
        assert!(script(&name).is_err());
    }
}
