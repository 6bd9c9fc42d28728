//! Which functions a shared library has, and which of them are the allocator's.
//!
//! Read from the file and not asked of the dynamic linker: loading a library runs its code, and a search through the
//! loaded one would also find what it depends on, so that every library would have a `free`.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use super::{PluginError, wish::Wish};
use oomph_base::nearest;

/// The pairs that allocators have by custom: PyTorch's documentation, RMM, the plain words, and our own.
const PAIRS: [(&str, &str); 4] =
    [("my_malloc", "my_free"), ("allocate", "deallocate"), ("alloc", "free"), ("oomph_alloc", "oomph_free")];
/// The hooks beyond the pair, by the names under which they need not be asked for.
const RECORD_STREAM: &str = "oomph_record_stream";
const RESET: &str = "oomph_reset";
const RESERVED: &str = "oomph_reserved";
const LIMIT: &str = "oomph_limit";
/// As many names as help; a C++ library has thousands.
const MOST_LIKELY: usize = 8;

/// The functions that a library defines for others.
#[derive(Debug)]
pub(super) struct Exported {
    file: PathBuf,
    names: Vec<String>,
}

/// The symbols that make up the allocator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) alloc: String,
    pub(super) free: String,
    pub(super) record_stream: Option<String>,
    pub(super) reset: Option<String>,
    pub(super) reserved: Option<String>,
    pub(super) limit: Option<String>,
}

impl Choice {
    /// What was wished for by name must be there; the rest is looked for under its usual names.
    pub(super) fn among(exported: &Exported, wish: &Wish<'_>) -> Result<Choice, PluginError> {
        let (alloc, free) = match (wish.alloc, wish.free) {
            (Some(alloc), Some(free)) => (exported.demand(alloc)?, exported.demand(free)?),
            _ => exported.usual_pair()?,
        };
        let hook = |wished: Option<&str>, usual: &str| match wished {
            Some(name) => exported.demand(name).map(Some),
            None => Ok(exported.has(usual).then(|| usual.to_owned())),
        };
        Ok(Choice {
            alloc,
            free,
            record_stream: hook(wish.record_stream, RECORD_STREAM)?,
            reset: hook(wish.reset, RESET)?,
            reserved: hook(wish.reserved, RESERVED)?,
            limit: hook(wish.limit, LIMIT)?,
        })
    }
}

impl Exported {
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
            likely: self.names.iter().filter(|name| sounds_like_it(name)).take(MOST_LIKELY).cloned().collect(),
        })
    }
}

/// Mangled names are left out: nobody types them, and a C++ function of any other shape would be called wrongly.
fn sounds_like_it(name: &str) -> bool {
    !name.starts_with("_Z") && ["alloc", "free", "delete"].iter().any(|word| name.to_lowercase().contains(word))
}

/// The functions that a library file defines for others, in alphabetical order.
pub(super) fn exported(file: &Path) -> Result<Exported, PluginError> {
    let io = |source| PluginError::Io { file: file.to_owned(), source };
    let mut reader = File::open(file).map_err(io)?;
    let mut names = dynamic_symbols(&mut reader).map_err(|trouble| match trouble {
        Trouble::Io(source) if source.kind() != io::ErrorKind::UnexpectedEof => io(source),
        Trouble::Io(_) => no_library(file, "it ends too early"),
        Trouble::Format(reason) => no_library(file, reason),
    })?;
    names.sort_unstable();
    names.dedup();
    Ok(Exported { file: file.to_owned(), names })
}

fn no_library(file: &Path, reason: &'static str) -> PluginError {
    PluginError::NoLibrary { file: file.to_owned(), reason }
}

/// Why the symbols cannot be read.
#[derive(Debug)]
enum Trouble {
    Io(io::Error),
    Format(&'static str),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Trouble {
        Trouble::Io(error)
    }
}

const HEADER_BYTES: u64 = 64;
const SECTION_BYTES: usize = 64;
const SYMBOL_BYTES: usize = 24;
/// The type of the section that holds the dynamic symbols.
const DYNAMIC_SYMBOLS: u32 = 11;
/// A table larger than this is not read: libraries of gigabytes have symbol tables of megabytes.
const MOST_TABLE_BYTES: u64 = 1 << 30;

/// The part of an ELF file that says where another part is.
struct Section {
    kind: u32,
    offset: u64,
    bytes: u64,
    link: u32,
}

/// The names of the functions that an ELF file defines for others.
fn dynamic_symbols(file: &mut (impl Read + Seek)) -> Result<Vec<String>, Trouble> {
    let header = part(file, 0, HEADER_BYTES)?;
    if !header.starts_with(b"\x7fELF") {
        return Err(Trouble::Format("it does not begin like one"));
    }
    if header[4] != 2 || header[5] != 1 {
        return Err(Trouble::Format("it is of another word size or byte order"));
    }
    let (at, count) = (u64_at(&header, 40), u16_at(&header, 60));
    let table = part(file, at, u64::from(count) * SECTION_BYTES as u64)?;
    let sections: Vec<Section> = table.chunks_exact(SECTION_BYTES).map(section).collect();
    let symbols = sections.iter().find(|section| section.kind == DYNAMIC_SYMBOLS);
    let symbols = symbols.ok_or(Trouble::Format("it has no dynamic symbols"))?;
    let names = sections.get(symbols.link as usize).ok_or(Trouble::Format("its symbols have no names"))?;
    let (symbols, names) = (part(file, symbols.offset, symbols.bytes)?, part(file, names.offset, names.bytes)?);
    Ok(symbols
        .chunks_exact(SYMBOL_BYTES)
        .filter(|symbol| is_own_function(symbol))
        .filter_map(|s| name(s, &names))
        .collect())
}

fn section(bytes: &[u8]) -> Section {
    Section { kind: u32_at(bytes, 4), offset: u64_at(bytes, 24), bytes: u64_at(bytes, 32), link: u32_at(bytes, 40) }
}

/// Global or weak, a function or an indirect one, and defined in this file.
fn is_own_function(symbol: &[u8]) -> bool {
    let (binding, kind, defined_in) = (symbol[4] >> 4, symbol[4] & 15, u16_at(symbol, 6));
    matches!(binding, 1 | 2) && matches!(kind, 2 | 10) && defined_in != 0
}

fn name(symbol: &[u8], names: &[u8]) -> Option<String> {
    let rest = names.get(u32_at(symbol, 0) as usize..)?;
    let text = rest.split(|&byte| byte == 0).next()?;
    String::from_utf8(text.to_vec()).ok()
}

fn part(file: &mut (impl Read + Seek), offset: u64, bytes: u64) -> Result<Vec<u8>, Trouble> {
    if bytes > MOST_TABLE_BYTES {
        return Err(Trouble::Format("it names a table that is too large"));
    }
    file.seek(SeekFrom::Start(offset))?;
    let mut part = Vec::new();
    file.take(bytes).read_to_end(&mut part)?;
    if part.len() as u64 == bytes { Ok(part) } else { Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()) }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array_at(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

/// Only asked within records whose length is known.
fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes[at + index])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn library(names: &[&str]) -> Exported {
        let mut names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        names.sort();
        Exported { file: "a.so".into(), names }
    }

    #[test]
    fn pairs_are_tried_in_order_and_only_whole() {
        let exported = library(&["allocate", "deallocate", "my_malloc", "alloc", "free", "oomph_reset"]);
        let choice = Choice::among(&exported, &Wish::default()).unwrap();
        assert_eq!((choice.alloc.as_str(), choice.free.as_str()), ("allocate", "deallocate"));
        assert_eq!((choice.reset.as_deref(), choice.reserved), (Some(RESET), None));
    }

    #[test]
    fn a_library_without_a_usual_pair_is_told_what_it_has() {
        let exported = library(&["take_alloc", "give_free", "_ZN4FreeEv", "unrelated"]);
        let message = Choice::among(&exported, &Wish::default()).unwrap_err().to_string();
        assert!(message.contains("my_malloc/my_free, allocate/deallocate, alloc/free"), "{message}");
        assert!(message.ends_with("alloc:SYMBOL,free:SYMBOL (it has give_free, take_alloc)"), "{message}");
        let wish = Wish { alloc: Some("take_aloc"), free: Some("give_free"), ..Wish::default() };
        let message = Choice::among(&exported, &wish).unwrap_err().to_string();
        assert_eq!(message, "a.so: no function 'take_aloc'; did you mean 'take_alloc'?");
    }

    #[test]
    fn what_is_no_library_is_said() {
        let read = |bytes: &[u8]| dynamic_symbols(&mut io::Cursor::new(bytes));
        assert!(matches!(read(b"short"), Err(Trouble::Io(_))));
        assert!(matches!(read(&[0; 64]), Err(Trouble::Format("it does not begin like one"))));
        let mut narrow = [0; 64];
        narrow[..6].copy_from_slice(b"\x7fELF\x01\x01");
        assert!(matches!(read(&narrow), Err(Trouble::Format(reason)) if reason.contains("word size")));
        narrow[4] = 2;
        assert!(matches!(read(&narrow), Err(Trouble::Format("it has no dynamic symbols"))));
    }

    proptest! {
        #[test]
        fn no_file_can_make_the_reader_panic(tail in prop::collection::vec(any::<u8>(), 58..400)) {
            let bytes: Vec<u8> = b"\x7fELF\x02\x01".iter().copied().chain(tail).collect();
            let _ = dynamic_symbols(&mut io::Cursor::new(bytes));
        }
    }
}
