//! Device code that comes while the program runs: modules that it loads (Triton's kernels), with what their functions need,
//! and NVRTC, which compiles to nothing.
//!
//! Inductor reads registers and local memory from the driver. It does not measure a candidate that spills registers, and adds candidates where
//! registers limit the occupancy, so they decide what it allocates while it compiles. They are in the section `.nv.info` of a
//! cubin, an ELF file: records of a format byte, an attribute byte and two bytes of length or value (the tool `cuobjdump
//! -elf` prints them by the names used here).

use std::{
    collections::HashMap,
    sync::{LazyLock, Mutex, RwLock},
};

use crate::{
    arguments::{In, Out, Text, copy_text, host_bytes, is_host, new_handle},
    card::card,
    errors::SUCCESS,
    launch, state,
};

/// What one function needs per thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FunctionNeeds {
    pub registers: u32,
    pub local_bytes: u32,
}

type NeedsByName = HashMap<String, FunctionNeeds>;

/// By the handle of the module.
static MODULES: LazyLock<RwLock<HashMap<u64, NeedsByName>>> = LazyLock::new(Default::default);
/// By the handle of the function.
static FUNCTIONS_WITH_NEEDS: LazyLock<RwLock<HashMap<u64, FunctionNeeds>>> = LazyLock::new(Default::default);

/// What a function needs, where its module says so.
pub fn needs_of(function: u64) -> Option<FunctionNeeds> {
    FUNCTIONS_WITH_NEEDS.read().unwrap_or_else(|poisoned| poisoned.into_inner()).get(&function).copied()
}

/// A function of a module: a handle that knows its name and its needs.
fn function(handle: Out<u64>, module: u64, name: Text) -> i32 {
    let made = new_handle(5);
    launch::register(made, name.get());
    let modules = MODULES.read().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(needs) = modules.get(&module).and_then(|functions| functions.get(name.get())) {
        FUNCTIONS_WITH_NEEDS.write().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(made, *needs);
    }
    handle.set(made);
    SUCCESS
}

fn load(module: Out<u64>, needs: Option<NeedsByName>) -> i32 {
    let made = new_handle(4);
    if let Some(needs) = needs {
        MODULES.write().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(made, needs);
    }
    module.set(made);
    SUCCESS
}

fn unload(module: u64) -> i32 {
    MODULES.write().unwrap_or_else(|poisoned| poisoned.into_inner()).remove(&module);
    SUCCESS
}

fn load_file(module: Out<u64>, path: Text) -> i32 {
    load(module, std::fs::read(path.get()).ok().and_then(|image| needs_in(&image)))
}

/// An image in memory, whose length only its header tells. Other kinds of images (PTX, fat binaries) are not read.
fn load_image(module: Out<u64>, image: In<u8>) -> i32 {
    let length = if is_host(image.0) { image_length(host_bytes(image.0, 4), image) } else { None };
    load(module, length.and_then(|length| needs_in(host_bytes(image.0, length))))
}

const HEADER_BYTES: usize = 64;
const SECTION_BYTES: usize = 64;
/// `EM_CUDA`.
const MACHINE: u16 = 190;
/// Records of `.nv.info`: the format whose data follow, and the attributes with a symbol and a number.
const FORMAT_SIZED: u8 = 4;
const FRAME_SIZE: u8 = 0x11;
const REGISTER_COUNT: u8 = 0x2f;
/// A cubin that says more is not one.
const MAX_IMAGE_BYTES: usize = 1 << 30;

/// Length of the ELF file at a place, as its header says: section headers lie behind all sections or before program headers.
fn image_length(magic: &[u8], image: In<u8>) -> Option<usize> {
    if magic != b"\x7fELF" {
        return None;
    }
    let header = host_bytes(image.0, HEADER_BYTES);
    let sections = usize::try_from(number::<8>(header, 40)?).ok()?;
    let count = number::<2>(header, 60)? as usize;
    let table_end = sections.checked_add(count * SECTION_BYTES).filter(|&end| end <= MAX_IMAGE_BYTES)?;
    let table = host_bytes(image.0, table_end);
    let ends = (0..count).filter_map(|index| section(table, index)).map(|section| section.offset + section.bytes);
    ends.max().map(|end| end.max(table_end)).filter(|&end| end <= MAX_IMAGE_BYTES)
}

/// A number of `N` bytes.
fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let part = bytes.get(at..at.checked_add(N)?)?;
    Some(part.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte)))
}

struct Section {
    name: usize,
    offset: usize,
    bytes: usize,
    link: usize,
}

/// A section that has contents in the file.
fn section(image: &[u8], index: usize) -> Option<Section> {
    const SHT_NOBITS: u64 = 8;
    let at = number::<8>(image, 40)? as usize + index * SECTION_BYTES;
    let has_contents = number::<4>(image, at + 4)? != SHT_NOBITS;
    Some(Section {
        name: number::<4>(image, at)? as usize,
        offset: usize::try_from(number::<8>(image, at + 24)?).ok()?.min(MAX_IMAGE_BYTES),
        bytes: if has_contents { usize::try_from(number::<8>(image, at + 32)?).ok()?.min(MAX_IMAGE_BYTES) } else { 0 },
        link: number::<4>(image, at + 40)? as usize,
    })
}

fn text(image: &[u8], at: usize) -> Option<&str> {
    let rest = image.get(at..)?;
    let end = rest.iter().position(|&byte| byte == 0)?;
    std::str::from_utf8(&rest[..end]).ok()
}

/// What the functions of a cubin need.
fn needs_in(image: &[u8]) -> Option<NeedsByName> {
    if !image.starts_with(b"\x7fELF\x02") || number::<2>(image, 18)? != u64::from(MACHINE) {
        return None;
    }
    let count = number::<2>(image, 60)? as usize;
    let names = section(image, number::<2>(image, 62)? as usize)?;
    let info = (0..count)
        .filter_map(|index| section(image, index))
        .find(|section| text(image, names.offset + section.name) == Some(".nv.info"))?;
    let symbols = section(image, info.link)?;
    let symbol_names = section(image, symbols.link)?;
    let mut needs = NeedsByName::new();
    let mut at = info.offset;
    while at + 4 <= info.offset + info.bytes {
        let (format, attribute) = (number::<1>(image, at)? as u8, number::<1>(image, at + 1)? as u8);
        let length = number::<2>(image, at + 2)? as usize;
        let data = at + 4;
        at = data + if format == FORMAT_SIZED { length } else { 0 };
        if format != FORMAT_SIZED || length != 8 || ![FRAME_SIZE, REGISTER_COUNT].contains(&attribute) {
            continue;
        }
        let symbol = symbols.offset + number::<4>(image, data)? as usize * 24;
        let name = text(image, symbol_names.offset + number::<4>(image, symbol)? as usize)?;
        let value = number::<4>(image, data + 4)? as u32;
        let function = needs.entry(name.to_owned()).or_default();
        *(if attribute == FRAME_SIZE { &mut function.local_bytes } else { &mut function.registers }) = value;
    }
    Some(needs)
}

/// The size of compiled code that is reported. Nothing reads it; programs refuse code without a size.
const CODE_BYTES: u64 = 16;

/// Names that a program asked to have in its code, by name. They are given out as C texts, so they stay.
static LOWERED_NAMES: Mutex<Option<HashMap<String, &'static str>>> = Mutex::new(None);

/// The name under which an expression is found. Real names are mangled; nothing looks into the code here.
fn lowered(name: &str) -> *const u8 {
    let mut names = state::locked(&LOWERED_NAMES);
    names
        .get_or_insert_default()
        .entry(name.to_owned())
        .or_insert_with(|| Box::leak(format!("{name}\0").into_boxed_str()))
        .as_ptr()
}

fn code_size(bytes: Out<u64>) -> i32 {
    bytes.set(CODE_BYTES);
    SUCCESS
}

fn compiled_code(target: Out<u8>) -> i32 {
    target.zero(CODE_BYTES as usize);
    SUCCESS
}

cuda_functions! {
    fn cuModuleLoad(module: Out<u64>, path: Text) -> i32 { load_file(module, path) }
    fn cuModuleLoadData(module: Out<u64>, image: In<u8>) -> i32 { load_image(module, image) }
    fn cuModuleLoadDataEx(module: Out<u64>, image: In<u8>, _count: u32, _options: u64, _values: u64) -> i32 { load_image(module, image) }
    fn cuModuleUnload(module: u64) -> i32 { unload(module) }
    fn cuModuleGetFunction(handle: Out<u64>, module: u64, name: Text) -> i32 { function(handle, module, name) }
    fn cuLibraryLoadData(library: Out<u64>, image: In<u8>, _options: u64, _values: u64, _count: u32, _library_options: u64, _library_values: u64, _library_count: u32) -> i32 {
        load_image(library, image)
    }
    fn cuLibraryLoadFromFile(library: Out<u64>, path: Text, _options: u64, _values: u64, _count: u32, _library_options: u64, _library_values: u64, _library_count: u32) -> i32 {
        load_file(library, path)
    }
    fn cuLibraryUnload(library: u64) -> i32 { unload(library) }
    fn cuLibraryGetKernel(handle: Out<u64>, library: u64, name: Text) -> i32 { function(handle, library, name) }
    fn cuKernelGetFunction(handle: Out<u64>, kernel: u64) -> i32 { handle.set(kernel); SUCCESS }
    fn nvrtcVersion(major: Out<i32>, minor: Out<i32>) -> i32 {
        major.set(card().cuda / 1000);
        minor.set(card().cuda % 1000 / 10);
        SUCCESS
    }
    fn nvrtcGetErrorString(_code: i32) -> *const u8 { c"NVRTC_SUCCESS".as_ptr().cast() }
    fn nvrtcCreateProgram(program: Out<u64>, _source: Text, _name: Text, _count: i32, _headers: u64, _names: u64) -> i32 { program.set(new_handle(3)); SUCCESS }
    fn nvrtcDestroyProgram(program: Out<u64>) -> i32 { program.set(0); SUCCESS }
    fn nvrtcGetNumSupportedArchs(count: Out<i32>) -> i32 { count.set(1); SUCCESS }
    fn nvrtcGetSupportedArchs(list: Out<i32>) -> i32 { list.set(card().major * 10 + card().minor); SUCCESS }
    fn nvrtcGetPTXSize(_program: u64, bytes: Out<u64>) -> i32 { code_size(bytes) }
    fn nvrtcGetPTX(_program: u64, target: Out<u8>) -> i32 { compiled_code(target) }
    fn nvrtcGetCUBINSize(_program: u64, bytes: Out<u64>) -> i32 { code_size(bytes) }
    fn nvrtcGetCUBIN(_program: u64, target: Out<u8>) -> i32 { compiled_code(target) }
    fn nvrtcGetLTOIRSize(_program: u64, bytes: Out<u64>) -> i32 { code_size(bytes) }
    fn nvrtcGetLTOIR(_program: u64, target: Out<u8>) -> i32 { compiled_code(target) }
    fn nvrtcGetProgramLogSize(_program: u64, bytes: Out<u64>) -> i32 { bytes.set(1); SUCCESS }
    fn nvrtcGetProgramLog(_program: u64, target: Out<u8>) -> i32 { copy_text("", target, 1); SUCCESS }
    fn nvrtcGetLoweredName(_program: u64, name: Text, lowered_name: Out<u64>) -> i32 { lowered_name.set(lowered(name.get()) as u64); SUCCESS }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An image with one function of 72 registers and 40 bytes of local memory.
    fn image() -> Vec<u8> {
        let names = b"\0.nv.info\0kernel\0";
        let mut symbols = vec![0; 24];
        symbols.extend(10u32.to_le_bytes());
        symbols.extend([0; 20]);
        let mut info = vec![3, 0x5a, 9, 9];
        for (attribute, value) in [(REGISTER_COUNT, 72u32), (FRAME_SIZE, 40)] {
            info.extend([FORMAT_SIZED, attribute, 8, 0, 1, 0, 0, 0]);
            info.extend(value.to_le_bytes());
        }
        let sections: [(u32, &[u8], u32); 3] = [(0, names, 0), (0, &symbols, 0), (1, &info, 1)];
        let mut made = vec![0u8; HEADER_BYTES];
        made[..5].copy_from_slice(b"\x7fELF\x02");
        made[18..20].copy_from_slice(&MACHINE.to_le_bytes());
        made[60] = 3;
        let mut table = Vec::new();
        for (name, contents, link) in sections {
            let mut header = [0u8; SECTION_BYTES];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[24..32].copy_from_slice(&(made.len() as u64).to_le_bytes());
            header[32..40].copy_from_slice(&(contents.len() as u64).to_le_bytes());
            header[40..44].copy_from_slice(&link.to_le_bytes());
            table.extend(header);
            made.extend(contents);
        }
        let table_at = made.len() as u64;
        made[40..48].copy_from_slice(&table_at.to_le_bytes());
        made.extend(table);
        made
    }

    #[test]
    fn needs_are_read_from_an_image() {
        let image = image();
        let (mut module, mut kernel) = (0, 0);
        assert_eq!(cuModuleLoadData(Out(&raw mut module), In(image.as_ptr())), SUCCESS);
        cuModuleGetFunction(Out(&raw mut kernel), module, Text(c"kernel".as_ptr()));
        assert_eq!(needs_of(kernel), Some(FunctionNeeds { registers: 72, local_bytes: 40 }));
        cuModuleGetFunction(Out(&raw mut kernel), module, Text(c"other".as_ptr()));
        assert_eq!(needs_of(kernel), None);
    }

    #[test]
    fn damaged_images_and_text_say_nothing() {
        let image = image();
        for end in 0..image.len() {
            let _ = needs_in(&image[..end]);
        }
        assert_eq!(needs_in(b".version 8.0\n.target sm_90\n"), None);
    }
}
