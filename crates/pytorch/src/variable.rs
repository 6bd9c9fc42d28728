//! The environment variable with the allocator's settings, whose name changed between releases.
//!
//! `PYTORCH_CUDA_ALLOC_CONF` is read by every release and deprecated from 2.10 on. `PYTORCH_ALLOC_CONF` is read from 2.10 on:
//! 2.9 knows the name and ignores it for CUDA. Where both are set, the old one wins
//! (`AcceleratorAllocatorConfig::instance`, 2.11).

use crate::{CONF_VARIABLE, Release, ReleaseSpan};

/// The name from 2.10 on.
pub const NEW_CONF_VARIABLE: &str = "PYTORCH_ALLOC_CONF";

/// The release that began to read it.
const FIRST_WITH_NEW_NAME: Release = Release::new(10);

/// Whether a program of one of these releases reads the new name, if that is the same for all of them.
fn reads_new_name(release: Option<ReleaseSpan>) -> Option<bool> {
    let span = release?;
    if span.first >= FIRST_WITH_NEW_NAME {
        return Some(true);
    }
    (span.last < FIRST_WITH_NEW_NAME).then_some(false)
}

/// The shell line that sets the allocator's settings. Without a known release it has the name that every release reads.
///
/// ```
/// use oomph_pytorch::{Release, ReleaseSpan, export_line};
/// let settings = "expandable_segments:True";
/// assert_eq!(export_line(settings, None), "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True");
/// let new = export_line(settings, Some(ReleaseSpan::only(Release::new(10))));
/// assert_eq!(new, "export PYTORCH_ALLOC_CONF=expandable_segments:True");
/// ```
#[must_use]
pub fn export_line(settings: &str, release: Option<ReleaseSpan>) -> String {
    let name = if reads_new_name(release) == Some(true) { NEW_CONF_VARIABLE } else { CONF_VARIABLE };
    // A list such as [256:1,>:8] has signs that a shell interprets.
    let quote = if settings.contains(['[', '>', ']']) { "'" } else { "" };
    format!("export {name}={quote}{settings}{quote}")
}

/// Which name is for which release; beside [`export_line`].
#[must_use]
pub fn variable_note(release: Option<ReleaseSpan>) -> &'static str {
    match reads_new_name(release) {
        Some(true) => {
            "PYTORCH_ALLOC_CONF is for PyTorch 2.10 and later, as recorded. The deprecated PYTORCH_CUDA_ALLOC_CONF wins if \
             both are set: unset it"
        }
        Some(false) => {
            "PYTORCH_CUDA_ALLOC_CONF is for PyTorch up to 2.9, as recorded. From 2.10 on it is PYTORCH_ALLOC_CONF"
        }
        None => {
            "every PyTorch reads PYTORCH_CUDA_ALLOC_CONF. From 2.10 on that name is deprecated, and PYTORCH_ALLOC_CONF is \
             the new one"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_quoted() {
        let settings = "roundup_power2_divisions:[256:1,>:8]";
        assert_eq!(export_line(settings, None), format!("export PYTORCH_CUDA_ALLOC_CONF='{settings}'"));
    }

    #[test]
    fn note_names_the_variable_of_the_line_and_the_other_one() {
        let spans = [(9, 9), (10, 11), (8, 12)];
        let spans = spans.map(|(first, last)| ReleaseSpan { first: Release::new(first), last: Release::new(last) });
        for release in [None].into_iter().chain(spans.map(Some)) {
            let (line, note) = (export_line("a:1", release), variable_note(release));
            let name = line.trim_start_matches("export ").trim_end_matches("=a:1");
            assert!(note.contains(name) && note.contains("2.10"), "{line}: {note}");
            assert!(note.contains(CONF_VARIABLE) && note.contains(NEW_CONF_VARIABLE), "{note}");
        }
    }
}
