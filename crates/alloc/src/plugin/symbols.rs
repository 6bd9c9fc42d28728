//! What users write after `plugin:` ([`PluginOptions`]), which functions the shared library exports, and which of them are
//! the allocator's.
//!
//! The symbols are read from the file, not through the dynamic linker: loading a library runs its
//! code, and a search in the loaded library would also find the functions of its dependencies, such
//! as `free`.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use object::{Object, ObjectSymbol, ReadCache, ReadRef, SymbolKind, read::elf::ElfFile64};

use super::ENTRY;
use crate::strategy::{SpecError, parameters};
use oomph_base::{did_you_mean, nearest};

/// The usual pairs: of PyTorch's documentation, of RMM, plain names, and our own.
const PAIRS: [(&str, &str); 4] =
    [("my_malloc", "my_free"), ("allocate", "deallocate"), ("alloc", "free"), ("oomph_alloc", "oomph_free")];
/// How many similar names a message lists; a C++ library has thousands.
const MOST_LIKELY: usize = 8;

/// The default time-out of a call: longer than any driver call, and shorter than stress waits for a
/// trial, so that the report names the call.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The parameters of a plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PluginOptions<'a> {
    pub(super) file: &'a str,
    /// The symbols that were given, by parameter: `alloc`, `free`, `record_stream`, `reset`,
    /// `reserved`, `limit`.
    symbols: Vec<(&'a str, &'a str)>,
    pub(super) timeout: Duration,
    /// Whether the user set the time-out.
    pub(super) sets_timeout: bool,
}

impl<'a> PluginOptions<'a> {
    /// Reads `FILE[,key:value]..`.
    pub(super) fn parse(text: &'a str) -> Result<PluginOptions<'a>, SpecError> {
        let (file, settings) = text.split_once(',').unwrap_or((text, ""));
        let refuse = |reason: &str| SpecError::BadParameters { strategy: ENTRY.name, reason: reason.to_owned() };
        let mut options =
            PluginOptions { file: file.trim(), symbols: Vec::new(), timeout: TIMEOUT, sets_timeout: false };
        if options.file.is_empty() {
            return Err(refuse("which file? Write plugin:FILE"));
        }
        parameters::read(&ENTRY, settings, |setting| {
            if setting.key == "timeout" {
                (options.timeout, options.sets_timeout) = (parse_timeout(setting.value)?, true);
            } else {
                options.symbols.push((setting.key, setting.value));
            }
            Ok(())
        })?;
        if options.symbol("alloc").is_some() != options.symbol("free").is_some() {
            return Err(refuse("'alloc' and 'free' belong together: name both or neither"));
        }
        Ok(options)
    }

    /// The symbol given for a parameter; the last one counts.
    pub(super) fn symbol(&self, parameter: &str) -> Option<&'a str> {
        self.symbols.iter().rev().find(|(key, _)| *key == parameter).map(|&(_, symbol)| symbol)
    }
}

fn parse_timeout(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(Duration::ZERO) => Err("'timeout': the time-out must be greater than zero".to_owned()),
        Ok(time) => Ok(time),
        Err(error) => Err(format!("'timeout': '{text}' is not a time such as 30s or 2m: {error}")),
    }
}

/// Why a file cannot be used as an allocator.
#[derive(Debug, thiserror::Error)]
pub enum PluginError {
    /// The file cannot be read.
    #[error("{file}: {source}", file = file.display())]
    Io {
        /// Which file.
        file: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file is of another kind.
    #[error("{file}: not a 64-bit ELF shared library with dynamic symbols: {reason}", file = file.display())]
    NoLibrary {
        /// Which file.
        file: PathBuf,
        /// What is missing.
        reason: String,
    },
    /// It does not export the symbol that was named.
    #[error("{file}: no function '{symbol}'{}", did_you_mean(suggestion.as_deref()), file = file.display())]
    NoSymbol {
        /// Which file.
        file: PathBuf,
        /// The symbol.
        symbol: String,
        /// The nearest that there is.
        suggestion: Option<String>,
    },
    /// It exports none of the usual pairs.
    #[error("{file}: none of {tried} is there; name them with alloc:SYMBOL,free:SYMBOL{}", in_words(likely), file = file.display())]
    NoPair {
        /// Which file.
        file: PathBuf,
        /// The pairs.
        tried: String,
        /// Similar names that it exports.
        likely: Vec<String>,
    },
    /// The system cannot load it.
    #[error("{file}: it cannot be loaded: {reason}", file = file.display())]
    Unloadable {
        /// Which file.
        file: PathBuf,
        /// The dynamic linker's error.
        reason: String,
    },
    /// The process that should load it refuses.
    #[error("{reason}")]
    Refused {
        /// The message of that process, which names the file.
        reason: String,
    },
    /// The process to load it into cannot be started.
    #[error("no process for the plugin can be started: {source}")]
    NoHost {
        /// The system's error.
        source: io::Error,
    },
}

fn in_words(names: &[String]) -> String {
    if names.is_empty() { String::new() } else { format!(" (it has {})", names.join(", ")) }
}

/// The symbols of an allocator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AllocatorSymbols {
    pub(super) alloc: String,
    pub(super) free: String,
    pub(super) record_stream: Option<String>,
    pub(super) reset: Option<String>,
    pub(super) reserved: Option<String>,
    pub(super) limit: Option<String>,
}

impl AllocatorSymbols {
    /// Finds the symbols in the file of a plugin. None of its code runs.
    pub(super) fn find(options: &PluginOptions<'_>) -> Result<AllocatorSymbols, PluginError> {
        AllocatorSymbols::among(&ExportedFunctions::read(Path::new(options.file))?, options)
    }

    /// Symbols that were named must be there; the others are looked up under their usual names.
    fn among(exported: &ExportedFunctions, options: &PluginOptions<'_>) -> Result<AllocatorSymbols, PluginError> {
        let (alloc, free) = match (options.symbol("alloc"), options.symbol("free")) {
            (Some(alloc), Some(free)) => (exported.demand(alloc)?, exported.demand(free)?),
            _ => exported.usual_pair()?,
        };
        let hook = |parameter: &str| match options.symbol(parameter) {
            Some(name) => exported.demand(name).map(Some),
            None => Ok(Some(format!("oomph_{parameter}")).filter(|usual| exported.has(usual))),
        };
        Ok(AllocatorSymbols {
            alloc,
            free,
            record_stream: hook("record_stream")?,
            reset: hook("reset")?,
            reserved: hook("reserved")?,
            limit: hook("limit")?,
        })
    }
}

/// The functions that a library exports, in alphabetical order.
#[derive(Debug)]
struct ExportedFunctions {
    file: PathBuf,
    names: Vec<String>,
}

impl ExportedFunctions {
    fn read(file: &Path) -> Result<ExportedFunctions, PluginError> {
        let opened = File::open(file).map_err(|source| PluginError::Io { file: file.to_owned(), source })?;
        // A library of gigabytes is not read as a whole.
        let mut names = function_names(&ReadCache::new(opened))
            .map_err(|reason| PluginError::NoLibrary { file: file.to_owned(), reason })?;
        names.sort_unstable();
        names.dedup();
        Ok(ExportedFunctions { file: file.to_owned(), names })
    }

    fn has(&self, name: &str) -> bool {
        self.names.binary_search_by(|known| known.as_str().cmp(name)).is_ok()
    }

    fn demand(&self, name: &str) -> Result<String, PluginError> {
        if self.has(name) {
            return Ok(name.to_owned());
        }
        let suggestion = nearest(name, self.names.iter().map(String::as_str));
        Err(PluginError::NoSymbol { file: self.file.clone(), symbol: name.to_owned(), suggestion })
    }

    fn usual_pair(&self) -> Result<(String, String), PluginError> {
        let found = PAIRS.iter().find(|(alloc, free)| self.has(alloc) && self.has(free));
        found.map(|(alloc, free)| ((*alloc).to_owned(), (*free).to_owned())).ok_or_else(|| PluginError::NoPair {
            file: self.file.clone(),
            tried: PAIRS.map(|(alloc, free)| format!("{alloc}/{free}")).join(", "),
            likely: self.names.iter().filter(|name| sounds_like_one(name)).take(MOST_LIKELY).cloned().collect(),
        })
    }
}

/// Mangled names are left out: users do not type them, and a C++ function of another type would be
/// called wrongly.
fn sounds_like_one(name: &str) -> bool {
    !name.starts_with("_Z") && ["alloc", "free", "delete"].iter().any(|word| name.to_lowercase().contains(word))
}

/// The names of the functions that an ELF file defines for others.
fn function_names<'a>(data: impl ReadRef<'a>) -> Result<Vec<String>, String> {
    let file = ElfFile64::<object::LittleEndian, _>::parse(data).map_err(|error| error.to_string())?;
    if file.dynamic_symbol_table().is_none() {
        return Err("it has no dynamic symbols".to_owned());
    }
    let functions = file
        .dynamic_symbols()
        .filter(|symbol| symbol.kind() == SymbolKind::Text && symbol.is_global() && !symbol.is_undefined());
    Ok(functions.filter_map(|symbol| symbol.name().ok().map(str::to_owned)).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn library(names: &[&str]) -> ExportedFunctions {
        let mut names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        names.sort();
        ExportedFunctions { file: "a.so".into(), names }
    }

    #[test]
    fn the_file_comes_first_and_symbols_by_name() {
        let options = PluginOptions::parse("./a.so,alloc:take, free:give ,reserved:held,timeout:2m").unwrap();
        assert_eq!((options.file, options.timeout), ("./a.so", Duration::from_secs(120)));
        let symbols = ["alloc", "free", "reserved", "reset"].map(|parameter| options.symbol(parameter));
        assert_eq!(symbols, [Some("take"), Some("give"), Some("held"), None]);
    }

    #[test]
    fn missing_and_misspelt_parameters_are_reported() {
        for (text, words) in [
            ("", "which file?"),
            (",alloc:a,free:b", "which file?"),
            ("a.so,alloc:a", "'alloc' and 'free' belong together"),
            ("a.so,aloc:a", "unknown parameter 'aloc'; did you mean 'alloc'?"),
            ("a.so,take", "'take' is not of the form key:value"),
            ("a.so,timeout:0s", "'timeout': the time-out must be greater than zero"),
            ("a.so,timeout:soon", "'timeout': 'soon' is not a time such as 30s or 2m"),
        ] {
            let message = PluginOptions::parse(text).unwrap_err().to_string();
            assert!(message.contains(words), "{text}: {message}");
        }
    }

    #[test]
    fn pairs_are_tried_in_order_and_only_whole() {
        let exported = library(&["allocate", "deallocate", "my_malloc", "alloc", "free", "oomph_reset"]);
        let symbols = AllocatorSymbols::among(&exported, &PluginOptions::parse("a.so").unwrap()).unwrap();
        assert_eq!((symbols.alloc.as_str(), symbols.free.as_str()), ("allocate", "deallocate"));
        assert_eq!((symbols.reset.as_deref(), symbols.reserved), (Some("oomph_reset"), None));
    }

    #[test]
    fn similar_names_are_listed_where_no_usual_pair_is_there() {
        let exported = library(&["take_alloc", "give_free", "_ZN4FreeEv", "unrelated"]);
        let message = |text| AllocatorSymbols::among(&exported, &PluginOptions::parse(text).unwrap()).unwrap_err();
        let unnamed = message("a.so").to_string();
        assert!(unnamed.contains("my_malloc/my_free, allocate/deallocate, alloc/free"), "{unnamed}");
        assert!(unnamed.ends_with("alloc:SYMBOL,free:SYMBOL (it has give_free, take_alloc)"), "{unnamed}");
        let misspelt = message("a.so,alloc:take_aloc,free:give_free").to_string();
        assert_eq!(misspelt, "a.so: no function 'take_aloc'; did you mean 'take_alloc'?");
    }

    #[test]
    fn files_of_other_kinds_are_refused() {
        let mut header = [0; 64];
        assert!(function_names(&b"short"[..]).is_err() && function_names(&header[..]).is_err());
        header[..7].copy_from_slice(b"\x7fELF\x01\x01\x01");
        assert!(function_names(&header[..]).is_err(), "32 bits");
        (header[4], header[20]) = (2, 1);
        assert_eq!(function_names(&header[..]).unwrap_err(), "it has no dynamic symbols");
    }

    #[test]
    fn only_exported_functions_are_listed() {
        let own = std::env::current_exe().unwrap();
        let cache = ReadCache::new(File::open(own).unwrap());
        // A test program exports little and imports much: an undefined symbol is not its function.
        assert!(!function_names(&cache).unwrap().iter().any(|name| name == "malloc"));
    }

    proptest! {
        #[test]
        fn no_file_makes_the_reader_panic(tail in prop::collection::vec(any::<u8>(), 58..400)) {
            let bytes: Vec<u8> = b"\x7fELF\x02\x01".iter().copied().chain(tail).collect();
            let _ = function_names(&bytes[..]);
        }
    }
}
