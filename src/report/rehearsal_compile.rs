//! What a rehearsal says about torch.compile: the state of Inductor's cache, and kernels chosen by simulated times.

use std::fmt::Write as _;

use super::render::counted;
use crate::{
    base::path_text,
    rehearse::{compile_cache::CompileCacheState, facts::CompileFacts},
};

/// One line.
pub(super) fn note(compile: &CompileFacts, cache: &CompileCacheState) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_of_the_cache_is_said() {
        let mut compile =
            CompileFacts { graphs_compiled: 2, candidates_measured: 9, kernels_chosen: Some(4), ..Default::default() };
        let text = note(&compile, &CompileCacheState::Empty);
        assert!(text.contains("began with an empty cache; the peaks include"), "{text}");
        assert!(text.contains("4 kernels were chosen by simulated times"), "{text}");
        compile.kernels_chosen = None;
        let text = note(&compile, &CompileCacheState::Chosen { folder: "/c".into() });
        assert!(text.contains("/c, and found 0 of 2 graphs") && text.contains("delete it"), "{text}");
        compile.candidates_measured = 0;
        let copied = CompileCacheState::Copied { from: "/c".into(), files: 3 };
        assert_eq!(
            note(&compile, &copied),
            "torch.compile used a copy of your cache /c (3 files), in which it found 0 of 2 graphs"
        );
    }
}
