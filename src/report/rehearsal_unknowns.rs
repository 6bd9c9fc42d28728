//! What a rehearsal does not know, in words: values that were read back, assumptions, and where workspaces and compiled
//! kernels come from.

use std::fmt::Write as _;

use super::{rehearsals::line, render::counted};
use crate::{
    base::{FileText, path_text},
    rehearse::{
        compile_cache::CompileCacheState,
        facts::{CompileFacts, ReadFacts},
        record::RehearsalRecord,
    },
};

/// How many lines of the program are named.
const SHOWN: usize = 5;

/// An assumption of the shadow GPU in words.
pub(super) fn assumption(name: &FileText, record: &RehearsalRecord) -> String {
    let words = match name.raw() {
        "nonzero" => "half of the elements that are counted on the GPU are not zero, or the share given by --nonzero",
        "false" => "conditions on values that were not computed are false: a program does not stop early",
        "all_true" => "checks whether all elements have a property are true",
        "cudnn_convolution_workspace_by_cudnn" => return workspaces_by_cudnn(record),
        "cudnn_convolution_workspace_by_rule" => return workspaces_by_rule(record),
        "cudnn_recurrent_space_by_rule" => {
            "workspaces of recurrent layers follow a rule that was measured on the H200 with cuDNN 9 only"
        }
        "cudnn_workspace_unknown" => "some workspaces of cuDNN are unknown and taken as empty",
        "nccl_buffers_not_counted" => {
            "NCCL's own buffers are not in these figures, nor in PyTorch's: one rank alone took 558 MiB for its first group and \
             388 MiB for a second on an H200; with more ranks they are not known, so what is left is an upper bound"
        }
        "absent_ranks" => {
            "some ranks were not rehearsed: in exchanges, the data of the rehearsed rank stands for theirs"
        }
        "rank_did_not_contribute" => {
            "a value was read that another rank did not send within 10 minutes; it is not known"
        }
        "nccl_split_size" => "the sizes of groups that NCCL splits are unknown",
        other => return FileText::from(other).to_string(),
    };
    words.to_owned()
}

/// Values that decide what the program does next, but were not computed.
pub(super) fn unknown(reads: &[ReadFacts]) -> String {
    if reads.is_empty() {
        return String::new();
    }
    let count: u64 = reads.iter().map(|read| read.count).sum();
    let values = counted(count as usize, "value was", "values were");
    let note = format!(
        "{values} read back from the GPU, which computes nothing: the figures hold if they do not decide shapes"
    );
    let mut text = line("not known", &note) + "\n";
    for read in reads.iter().take(SHOWN) {
        let place = if read.r#where.raw().is_empty() { "an unknown line".to_owned() } else { read.r#where.to_string() };
        let kernel = if read.kernel.raw().is_empty() {
            String::new()
        } else {
            format!(", made by {}", FileText::from(kernel_name(read.kernel.raw())))
        };
        let _ = writeln!(text, "  {:>10}  {place}{kernel}", format!("{} x", read.count));
    }
    if reads.len() > SHOWN {
        let _ = writeln!(text, "  and {} more", counted(reads.len() - SHOWN, "place", "places"));
    }
    text
}

/// Workspaces of convolutions that the installed cuDNN gave.
fn workspaces_by_cudnn(record: &RehearsalRecord) -> String {
    let plans = counted(record.convolutions_by_cudnn as usize, "plan", "plans");
    format!(
        "workspaces of convolutions ({plans}) come from the installed cuDNN, asked for a card with these properties"
    )
}

/// Workspaces of convolutions that a rule gave.
fn workspaces_by_rule(record: &RehearsalRecord) -> String {
    let plans = counted(record.convolutions_by_rule as usize, "plan", "plans");
    let rule = "follow a rule from measurements on the H200";
    match &record.cudnn_reason {
        Some(reason) => format!(
            "workspaces of convolutions ({plans}) {rule}; peaks of whole networks were up to 16 % off. They come from cuDNN itself where it is installed \
             (nvidia-cudnn-cu12 or nvidia-cudnn-cu13, 9.8 or newer, for the CUDA of PyTorch); not used here: {reason}"
        ),
        None => format!(
            "workspaces of convolutions ({plans}) that the installed cuDNN refuses or cannot know without a GPU {rule}; peaks of \
             whole networks were up to 6 % off"
        ),
    }
}

/// What torch.compile did: the state of Inductor's cache, and kernels chosen by simulated times.
pub(super) fn compile_note(compile: &CompileFacts, cache: &CompileCacheState) -> String {
    let hits = format!("{} of {}", compile.graphs_from_cache, compile.graphs_from_cache + compile.graphs_compiled);
    let mut text = match cache {
        CompileCacheState::Empty => "torch.compile began with an empty cache".to_owned(),
        CompileCacheState::Copied { from, files: 0 } => {
            format!("torch.compile began with an empty cache, as {} is", path_text(from))
        }
        CompileCacheState::Copied { from, files } => format!(
            "torch.compile used a copy of your cache {} ({files} files), in which it found {hits} graphs",
            path_text(from)
        ),
        CompileCacheState::NotCopied { from, reason } => {
            format!("torch.compile began with an empty cache: {} was not copied ({reason})", path_text(from))
        }
        CompileCacheState::Chosen { folder } => format!(
            "torch.compile used the cache that the program chose, {}, and found {hits} graphs in it",
            path_text(folder)
        ),
    };
    if compile.candidates_measured > 0 {
        text.push_str("; the peaks include what Inductor allocates while it measures kernels");
        let kernels = compile
            .kernels_chosen
            .map_or_else(|| "kernels were".to_owned(), |chosen| counted(chosen as usize, "kernel was", "kernels were"));
        let _ = write!(text, "; {kernels} chosen by simulated times, a GPU may choose others");
        if let CompileCacheState::Chosen { .. } = cache {
            text.push_str(": these choices are in that cache now, delete it before you use it with a GPU");
        }
    }
    text
}

/// The last name of a mangled C++ function, without its namespaces and template arguments: `multi_tensor_apply_kernel` for
/// `_ZN2at6native25multi_tensor_apply_kernelINS1_...`. Other names stay as they are.
fn kernel_name(mangled: &str) -> &str {
    let Some(mut rest) = mangled.strip_prefix("_Z") else { return mangled };
    rest = rest.strip_prefix('N').unwrap_or(rest);
    let mut last = None;
    loop {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let Ok(length) = rest[..digits].parse::<usize>() else { break };
        let Some(name) = rest.get(digits..digits + length) else { break };
        if !name.starts_with("_GLOBAL__N") {
            last = Some(name);
        }
        rest = &rest[digits + length..];
    }
    last.unwrap_or(mangled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_source_of_workspaces_is_named_with_the_reason() {
        let mut record =
            RehearsalRecord { convolutions_by_cudnn: 12, convolutions_by_rule: 1, ..RehearsalRecord::default() };
        assert!(
            workspaces_by_cudnn(&record)
                .starts_with("workspaces of convolutions (12 plans) come from the installed cuDNN")
        );
        assert!(
            workspaces_by_rule(&record)
                .starts_with("workspaces of convolutions (1 plan) that the installed cuDNN refuses or")
        );
        record.cudnn_reason = Some("cuDNN 9 is not installed".into());
        assert!(workspaces_by_rule(&record).ends_with("not used here: cuDNN 9 is not installed"));
    }

    #[test]
    fn the_state_of_the_cache_is_said() {
        let mut compile =
            CompileFacts { graphs_compiled: 2, candidates_measured: 9, kernels_chosen: Some(4), ..Default::default() };
        let text = compile_note(&compile, &CompileCacheState::Empty);
        assert!(text.contains("began with an empty cache; the peaks include"), "{text}");
        assert!(text.contains("4 kernels were chosen by simulated times"), "{text}");
        compile.kernels_chosen = None;
        let text = compile_note(&compile, &CompileCacheState::Chosen { folder: "/c".into() });
        assert!(text.contains("/c, and found 0 of 2 graphs") && text.contains("delete it"), "{text}");
        compile.candidates_measured = 0;
        let copied = CompileCacheState::Copied { from: "/c".into(), files: 3 };
        assert_eq!(
            compile_note(&compile, &copied),
            "torch.compile used a copy of your cache /c (3 files), in which it found 0 of 2 graphs"
        );
    }

    #[test]
    fn namespaces_and_arguments_are_left_out() {
        let mangled = "_ZN2at6native54_GLOBAL__N__f8a10d72_21_ForeachPointwiseOp_cu_ef478fac25multi_tensor_apply_kernelINS1_8TensorIfEEEvT_";
        assert_eq!(kernel_name(mangled), "multi_tensor_apply_kernel");
        assert_eq!(kernel_name("_Z6kernelPf"), "kernel");
        for other in ["triton_poi_fused_0", "", "_Z", "_ZN99short", "_ZTV5Class"] {
            assert_eq!(kernel_name(other), other);
        }
    }
}
