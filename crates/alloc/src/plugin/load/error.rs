//! Why a file is no allocator.

use std::{io, path::PathBuf};

use oomph_base::did_you_mean;

/// Why a file is no allocator.
#[derive(Debug, thiserror::Error)]
pub enum PluginError {
    /// It cannot be read.
    #[error("{file}: {source}", file = file.display())]
    Io {
        /// Which file.
        file: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It is something else.
    #[error("{file}: not a 64-bit ELF shared library with dynamic symbols: {reason}", file = file.display())]
    NoLibrary {
        /// Which file.
        file: PathBuf,
        /// What is missing.
        reason: &'static str,
    },
    /// It has no symbol of the name that was asked for.
    #[error("{file}: no function '{symbol}'{}", did_you_mean(suggestion.as_deref()), file = file.display())]
    NoSymbol {
        /// Which file.
        file: PathBuf,
        /// What was looked for.
        symbol: String,
        /// The nearest that there is.
        suggestion: Option<String>,
    },
    /// It has none of the pairs that allocators usually have.
    #[error("{file}: none of {tried} is there; name them with alloc:SYMBOL,free:SYMBOL{}", in_words(likely), file = file.display())]
    NoPair {
        /// Which file.
        file: PathBuf,
        /// What was looked for.
        tried: String,
        /// What it has that sounds like it.
        likely: Vec<String>,
    },
    /// The system will not load it.
    #[error("{file}: it cannot be loaded: {reason}", file = file.display())]
    Unloadable {
        /// Which file.
        file: PathBuf,
        /// What the dynamic linker said.
        reason: String,
    },
    /// The process that should load it says no.
    #[error("{reason}")]
    Refused {
        /// In its words, which name the file.
        reason: String,
    },
    /// There is no process to load it into.
    #[error("no process for the plugin can be started: {source}")]
    NoHost {
        /// What the system said.
        source: io::Error,
    },
}

fn in_words(names: &[String]) -> String {
    if names.is_empty() { String::new() } else { format!(" (it has {})", names.join(", ")) }
}
