//! The shadow GPU: stand-ins for NVIDIA's CUDA libraries that keep books and compute nothing.
//!
//! The stand-ins are a shared library ([`LIBRARY`], sources in `core/`), which is embedded in the program and written to
//! the user's cache. [`functions`] is the table of all functions it serves. This crate knows nothing about PyTorch's
//! files or processes; `oomph rehearse` does.

use object::{
    LittleEndian, ReadRef,
    elf::{self, FileHeader64},
    read::elf::{Dyn as _, FileHeader as _},
};

pub mod forwarder;
pub mod functions;
pub mod served_call;

/// The shared library; empty on machines other than x86-64 Linux.
pub const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/liboomph_shadow.so"));

/// The file names of the libraries that a library names.
pub fn needed_libraries<'data>(data: impl ReadRef<'data>) -> object::Result<Vec<String>> {
    let header = FileHeader64::<LittleEndian>::parse(data)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, data)?;
    let Some((entries, link)) = sections.dynamic(endian, data)? else { return Ok(Vec::new()) };
    let strings = sections.strings(endian, data, link)?;
    let entries = entries.iter().filter(|entry| entry.tag32(endian) == Some(elf::DT_NEEDED));
    let text = |entry: &elf::Dyn64<LittleEndian>| {
        let offset = u32::try_from(entry.d_val(endian)).unwrap_or(u32::MAX);
        strings.get(offset).map(|name| String::from_utf8_lossy(name).into_owned()).unwrap_or_default()
    };
    Ok(entries.map(text).collect())
}
