//! Writes forwarders: small shared libraries with the name of one of NVIDIA's and its functions, each of which jumps into the
//! core of the shadow GPU.
//!
//! A program that needs `libcudart.so.13` gets a file with that name, the functions that are needed and their versions. When
//! it is loaded, it passes its table of slots to the core (`oomph_shadow_bind`), which fills in where each function goes.
//! Nothing is compiled: the code of a function is 10 bytes.
//!
//! ```text
//! function i:  lea slot_i(%rip), %r11      the core's generic entry finds its record at 8(%r11)
//!              jmp *(%r11)
//! DT_INIT:     oomph_shadow_bind(soname, names, slots, count)
//! ```

use std::collections::{BTreeMap, BTreeSet};

use object::{
    Endianness,
    elf::{self, gnu_hash},
    write::{
        StringId,
        elf::{FileHeader, ProgramHeader, Rel, SectionHeader, SectionIndex, Sym, Verdef, Writer},
    },
};

/// Names of functions, each with its version where it has one.
pub type NeededFunctions = BTreeMap<String, Option<String>>;

/// The file name of the core, which every forwarder needs.
pub const CORE_SONAME: &str = "liboomph_shadow.so";
/// The function of the core that fills the slots.
pub const BIND: &str = "oomph_shadow_bind";

/// Pages of the loader.
const PAGE: usize = 4096;
/// Code pointer and record pointer.
const SLOT_BYTES: usize = 16;
/// Code of one function, padded.
const STUB_BYTES: usize = 16;
const INIT_BYTES: usize = 48;
const BLOOM_SHIFT: u32 = 6;

/// Why a forwarder cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum ForwarderError {
    /// The format has no room for it.
    #[error("{soname}: {reason}")]
    Format {
        /// Of which library.
        soname: String,
        /// What the writer says.
        reason: String,
    },
}

/// A forwarder to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwarderPlan {
    soname: String,
    /// In the order of the hash table. The index of a version is its place in `versions`.
    functions: Vec<ForwardedFunction>,
    versions: Vec<String>,
    buckets: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct ForwardedFunction {
    name: String,
    hash: u32,
    version: Option<usize>,
}

impl ForwarderPlan {
    /// The functions that are needed, with their versions, and all others that are known. These get the version of the
    /// library if it has one: extensions and `dlsym` look for it.
    pub fn new<'a>(soname: &str, needed: &NeededFunctions, known: impl IntoIterator<Item = &'a str>) -> ForwarderPlan {
        let versions: BTreeSet<&String> = needed.values().flatten().collect();
        let versions: Vec<String> = versions.into_iter().cloned().collect();
        let common = versions.first().filter(|_| versions.len() == 1);
        let mut all: BTreeMap<&str, Option<&String>> = known.into_iter().map(|name| (name, common)).collect();
        all.extend(needed.iter().map(|(name, version)| (name.as_str(), version.as_ref().or(common))));
        // NUL ends a name in the file.
        all.retain(|name, _| !name.is_empty() && !name.contains('\0'));
        let buckets = u32::try_from(all.len() / 4).unwrap_or(u32::MAX).max(1);
        let mut functions: Vec<ForwardedFunction> = all
            .into_iter()
            .map(|(name, version)| ForwardedFunction {
                name: name.to_owned(),
                hash: gnu_hash(name.as_bytes()),
                version: version.and_then(|version| versions.iter().position(|known| known == version)),
            })
            .collect();
        functions.sort_by_key(|function| function.hash % buckets);
        ForwarderPlan { soname: soname.to_owned(), functions, versions, buckets }
    }

    /// Its file name.
    #[must_use]
    pub fn soname(&self) -> &str {
        &self.soname
    }

    /// The library.
    pub fn write(&self) -> Result<Vec<u8>, ForwarderError> {
        let failed = |reason: String| ForwarderError::Format { soname: self.soname.clone(), reason };
        let mut file = Vec::new();
        let mut writer = Writer::new(Endianness::Little, true, &mut file);
        let layout = ForwarderLayout::reserve(&mut writer, self);
        layout.write_headers(&mut writer).map_err(|error| failed(error.to_string()))?;
        layout.write_tables(&mut writer, self);
        layout.write_code(&mut writer, self).ok_or_else(|| failed("it has too many functions".to_owned()))?;
        layout.write_data(&mut writer, self);
        layout.write_sections(&mut writer);
        Ok(file)
    }

    /// Names one after the other, each with its NUL.
    fn names(&self) -> Vec<u8> {
        self.functions.iter().flat_map(|function| function.name.bytes().chain([0])).collect()
    }

    /// A power of two; 8 bits for each function.
    fn bloom_words(&self) -> u32 {
        u32::try_from(self.functions.len() / 8).unwrap_or(1).max(1).next_power_of_two()
    }
}

/// Where everything lies. Offsets in the file are addresses: the second segment begins on its own page.
struct ForwarderLayout {
    ids: LayoutStrings,
    text_section: SectionIndex,
    sections: [(StringId, SectionIndex); 4],
    dynsym: usize,
    dynstr: usize,
    hash: usize,
    versym: usize,
    verdef: usize,
    rela: usize,
    soname: usize,
    names: usize,
    text: usize,
    text_end: usize,
    data: usize,
    dynamic: usize,
    got: usize,
    slots: usize,
    slots_end: usize,
}

struct LayoutStrings {
    soname: StringId,
    core: StringId,
    beside: StringId,
    bind: StringId,
    functions: Vec<StringId>,
    versions: Vec<StringId>,
}

/// `DT_*` entries, the last one included.
const DYNAMIC_ENTRIES: usize = 17;
/// Programs that find a forwarder by themselves, such as a launcher that Triton links, find the core beside it.
const BESIDE: &str = "$ORIGIN";

impl ForwarderLayout {
    fn reserve<'a>(writer: &mut Writer<'a>, plan: &'a ForwarderPlan) -> ForwarderLayout {
        let count = plan.functions.len();
        writer.reserve_null_section_index();
        let sections = [".rela.dyn", ".text", ".got", ".bss"]
            .map(|name| (writer.add_section_name(name.as_bytes()), writer.reserve_section_index()));
        writer.reserve_dynsym_section_index();
        writer.reserve_dynstr_section_index();
        writer.reserve_gnu_hash_section_index();
        writer.reserve_gnu_versym_section_index();
        writer.reserve_gnu_verdef_section_index();
        writer.reserve_dynamic_section_index();
        writer.reserve_shstrtab_section_index();
        writer.reserve_null_dynamic_symbol_index();
        // The function of the core comes first: symbols that are not in the hash table lie before those that are.
        for _ in 0..=count {
            writer.reserve_dynamic_symbol_index();
        }
        let ids = LayoutStrings {
            soname: writer.add_dynamic_string(plan.soname.as_bytes()),
            core: writer.add_dynamic_string(CORE_SONAME.as_bytes()),
            beside: writer.add_dynamic_string(BESIDE.as_bytes()),
            bind: writer.add_dynamic_string(BIND.as_bytes()),
            functions: plan.functions.iter().map(|one| writer.add_dynamic_string(one.name.as_bytes())).collect(),
            versions: plan.versions.iter().map(|version| writer.add_dynamic_string(version.as_bytes())).collect(),
        };
        writer.reserve_file_header();
        writer.reserve_program_headers(4);
        let dynsym = writer.reserve_dynsym();
        let dynstr = writer.reserve_dynstr();
        let hash = writer.reserve_gnu_hash(plan.bloom_words(), plan.buckets, u32::try_from(count).unwrap_or(u32::MAX));
        let versym = writer.reserve_gnu_versym();
        let verdef = writer.reserve_gnu_verdef(1 + plan.versions.len(), 1 + plan.versions.len());
        let rela = writer.reserve_relocations(1, true);
        let soname = writer.reserve(plan.soname.len() + 1, 1);
        let names = writer.reserve(plan.names().len(), 1);
        let text = writer.reserve(INIT_BYTES + count * STUB_BYTES, 16);
        let text_end = writer.reserved_len();
        let data = text_end.next_multiple_of(PAGE);
        writer.reserve_until(data);
        let dynamic = writer.reserve_dynamic(DYNAMIC_ENTRIES);
        let got = writer.reserve(8, 8);
        let slots = (got + 8).next_multiple_of(SLOT_BYTES);
        let slots_end = slots + count * SLOT_BYTES;
        writer.reserve_shstrtab();
        writer.reserve_section_headers();
        let text_section = sections[1].1;
        ForwarderLayout {
            ids,
            text_section,
            sections,
            dynsym,
            dynstr,
            hash,
            versym,
            verdef,
            rela,
            soname,
            names,
            text,
            text_end,
            data,
            dynamic,
            got,
            slots,
            slots_end,
        }
    }

    fn write_headers(&self, writer: &mut Writer<'_>) -> object::write::Result<()> {
        writer.write_file_header(&FileHeader {
            os_abi: elf::ELFOSABI_NONE,
            abi_version: 0,
            e_type: elf::ET_DYN,
            e_machine: elf::EM_X86_64,
            e_entry: 0,
            e_flags: 0,
        })?;
        let segment = |p_type, p_flags, from: usize, file_end: usize, end: usize, align: usize| ProgramHeader {
            p_type,
            p_flags,
            p_offset: from as u64,
            p_vaddr: from as u64,
            p_paddr: from as u64,
            p_filesz: (file_end - from) as u64,
            p_memsz: (end - from) as u64,
            p_align: align as u64,
        };
        let data_end = self.got + 8;
        writer.write_align_program_headers();
        writer.write_program_header(&segment(
            elf::PT_LOAD,
            elf::PF_R | elf::PF_X,
            0,
            self.text_end,
            self.text_end,
            PAGE,
        ));
        writer.write_program_header(&segment(
            elf::PT_LOAD,
            elf::PF_R | elf::PF_W,
            self.data,
            data_end,
            self.slots_end,
            PAGE,
        ));
        writer.write_program_header(&segment(
            elf::PT_DYNAMIC,
            elf::PF_R | elf::PF_W,
            self.dynamic,
            self.got,
            self.got,
            8,
        ));
        // Without it the loader makes the stack of the program executable, or refuses the library.
        writer.write_program_header(&segment(elf::PT_GNU_STACK, elf::PF_R | elf::PF_W, 0, 0, 0, 16));
        Ok(())
    }

    fn write_tables(&self, writer: &mut Writer<'_>, plan: &ForwarderPlan) {
        let symbol = |name, section, value: usize, size: usize| Sym {
            name: Some(name),
            section,
            st_info: (elf::STB_GLOBAL << 4) | if section.is_some() { elf::STT_FUNC } else { elf::STT_NOTYPE },
            st_other: elf::STV_DEFAULT,
            st_shndx: elf::SHN_UNDEF,
            st_value: value as u64,
            st_size: size as u64,
        };
        writer.write_null_dynamic_symbol();
        writer.write_dynamic_symbol(&symbol(self.ids.bind, None, 0, 0));
        for (place, name) in self.ids.functions.iter().enumerate() {
            writer.write_dynamic_symbol(&symbol(*name, Some(self.text_section), self.stub(place), STUB_BYTES));
        }
        writer.write_dynstr();
        let hash = |place: u32| plan.functions[place as usize].hash;
        let count = plan.functions.len() as u32;
        writer.write_gnu_hash(2, BLOOM_SHIFT, plan.bloom_words(), plan.buckets, count, hash);
        writer.write_null_gnu_versym();
        writer.write_gnu_versym(elf::VER_NDX_GLOBAL);
        for function in &plan.functions {
            writer.write_gnu_versym(function.version.map_or(elf::VER_NDX_GLOBAL, version_index));
        }
        writer.write_align_gnu_verdef();
        let definition =
            |flags, index, name| Verdef { version: elf::VER_DEF_CURRENT, flags, index, aux_count: 1, name };
        writer.write_gnu_verdef(&definition(elf::VER_FLG_BASE, elf::VER_NDX_GLOBAL, self.ids.soname));
        for (place, name) in self.ids.versions.iter().enumerate() {
            writer.write_gnu_verdef(&definition(0, version_index(place), *name));
        }
        writer.write_align_relocation();
        let bind = Rel { r_offset: self.got as u64, r_sym: 1, r_type: elf::R_X86_64_GLOB_DAT, r_addend: 0 };
        writer.write_relocation(true, &bind);
        writer.write(plan.soname.as_bytes());
        writer.write(&[0]);
        writer.write(&plan.names());
    }

    fn stub(&self, place: usize) -> usize {
        self.text + INIT_BYTES + place * STUB_BYTES
    }

    /// `None` where a distance does not fit into 32 bits.
    fn write_code(&self, writer: &mut Writer<'_>, plan: &ForwarderPlan) -> Option<()> {
        writer.pad_until(self.text);
        let mut code = Assembly { code: Vec::new(), origin: self.text };
        code.bytes(&[0x48, 0x83, 0xec, 0x08]); // sub $8, %rsp
        code.relative(&[0x48, 0x8d, 0x3d], self.soname)?; // lea soname(%rip), %rdi
        code.relative(&[0x48, 0x8d, 0x35], self.names)?; // lea names(%rip), %rsi
        code.relative(&[0x48, 0x8d, 0x15], self.slots)?; // lea slots(%rip), %rdx
        code.bytes(&[0xb9]); // mov $count, %ecx
        code.bytes(&u32::try_from(plan.functions.len()).ok()?.to_le_bytes());
        code.relative(&[0xff, 0x15], self.got)?; // call *bind(%rip)
        code.bytes(&[0x48, 0x83, 0xc4, 0x08, 0xc3]); // add $8, %rsp; ret
        code.pad_to(INIT_BYTES);
        for place in 0..plan.functions.len() {
            code.relative(&[0x4c, 0x8d, 0x1d], self.slots + place * SLOT_BYTES)?; // lea slot(%rip), %r11
            code.bytes(&[0x41, 0xff, 0x23]); // jmp *(%r11)
            code.pad_to(INIT_BYTES + (place + 1) * STUB_BYTES);
        }
        writer.write(&code.code);
        Some(())
    }

    fn write_data(&self, writer: &mut Writer<'_>, plan: &ForwarderPlan) {
        writer.pad_until(self.data);
        writer.write_align_dynamic();
        writer.write_dynamic_string(elf::DT_NEEDED, self.ids.core);
        writer.write_dynamic_string(elf::DT_SONAME, self.ids.soname);
        writer.write_dynamic_string(elf::DT_RUNPATH, self.ids.beside);
        let entries = [
            (elf::DT_INIT, self.text),
            (elf::DT_GNU_HASH, self.hash),
            (elf::DT_STRTAB, self.dynstr),
            (elf::DT_STRSZ, writer.dynstr_len()),
            (elf::DT_SYMTAB, self.dynsym),
            (elf::DT_SYMENT, 24),
            (elf::DT_RELA, self.rela),
            (elf::DT_RELASZ, 24),
            (elf::DT_RELAENT, 24),
            (elf::DT_VERSYM, self.versym),
            (elf::DT_VERDEF, self.verdef),
            (elf::DT_VERDEFNUM, 1 + plan.versions.len()),
            (elf::DT_FLAGS, elf::DF_BIND_NOW as usize),
            (elf::DT_NULL, 0),
        ];
        entries.into_iter().for_each(|(tag, value)| writer.write_dynamic(tag, value as u64));
        writer.write(&[0; 8]);
    }

    fn write_sections(&self, writer: &mut Writer<'_>) {
        writer.write_shstrtab();
        let dynsym = writer.dynsym_index().0;
        writer.write_null_section_header();
        let section =
            |place: usize, sh_type, flags: u32, from: usize, end: usize, align: u64, link: u32, entry: u64| {
                SectionHeader {
                    name: Some(self.sections[place].0),
                    sh_type,
                    sh_flags: flags.into(),
                    sh_addr: from as u64,
                    sh_offset: from as u64,
                    sh_size: (end - from) as u64,
                    sh_link: link,
                    sh_info: 0,
                    sh_addralign: align,
                    sh_entsize: entry,
                }
            };
        let writable = elf::SHF_ALLOC | elf::SHF_WRITE;
        let code = elf::SHF_ALLOC | elf::SHF_EXECINSTR;
        writer.write_section_header(&section(
            0,
            elf::SHT_RELA,
            elf::SHF_ALLOC,
            self.rela,
            self.rela + 24,
            8,
            dynsym,
            24,
        ));
        writer.write_section_header(&section(1, elf::SHT_PROGBITS, code, self.text, self.text_end, 16, 0, 0));
        writer.write_section_header(&section(2, elf::SHT_PROGBITS, writable, self.got, self.got + 8, 8, 0, 8));
        writer.write_section_header(&section(3, elf::SHT_NOBITS, writable, self.slots, self.slots_end, 16, 0, 0));
        writer.write_dynsym_section_header(self.dynsym as u64, 1);
        writer.write_dynstr_section_header(self.dynstr as u64);
        writer.write_gnu_hash_section_header(self.hash as u64);
        writer.write_gnu_versym_section_header(self.versym as u64);
        writer.write_gnu_verdef_section_header(self.verdef as u64);
        writer.write_dynamic_section_header(self.dynamic as u64);
        writer.write_shstrtab_section_header();
    }
}

/// Index 1 is the library itself.
fn version_index(place: usize) -> u16 {
    u16::try_from(place + 2).unwrap_or(elf::VER_NDX_GLOBAL)
}

/// x86-64 code at an address.
struct Assembly {
    code: Vec<u8>,
    origin: usize,
}

impl Assembly {
    fn bytes(&mut self, bytes: &[u8]) {
        self.code.extend_from_slice(bytes);
    }

    /// An instruction that ends with the distance from its end to a target.
    fn relative(&mut self, instruction: &[u8], target: usize) -> Option<()> {
        self.bytes(instruction);
        let end = self.origin + self.code.len() + 4;
        let distance = i64::try_from(target).ok()? - i64::try_from(end).ok()?;
        self.bytes(&i32::try_from(distance).ok()?.to_le_bytes());
        Some(())
    }

    /// Fills up with breakpoints, which are never reached.
    fn pad_to(&mut self, length: usize) {
        self.code.resize(length, 0xcc);
    }
}

#[cfg(test)]
mod tests {
    use object::{Object as _, ObjectSymbol as _, read::elf::ElfFile64};

    use super::*;

    fn plan() -> ForwarderPlan {
        let version = Some("libcudart.so.13".to_owned());
        let needed = NeededFunctions::from([("cudaMalloc".to_owned(), version), ("cudaFree".to_owned(), None)]);
        ForwarderPlan::new("libcudart.so.13", &needed, ["cudaMemGetInfo", "cudaMalloc"])
    }

    #[test]
    fn a_library_has_every_function_once_with_the_version_of_the_library() {
        let file = plan().write().unwrap();
        let library = ElfFile64::<object::LittleEndian>::parse(&*file).unwrap();
        let mut names: Vec<&str> =
            library.dynamic_symbols().filter(|one| one.is_definition()).map(|one| one.name().unwrap()).collect();
        names.sort_unstable();
        assert_eq!(names, ["cudaFree", "cudaMalloc", "cudaMemGetInfo"]);
        assert!(plan().functions.iter().all(|function| function.version == Some(0)));
        let undefined: Vec<&str> =
            library.dynamic_symbols().filter(|one| one.is_undefined()).map(|one| one.name().unwrap()).collect();
        assert_eq!(undefined, [BIND]);
    }

    #[test]
    fn symbols_are_in_the_order_of_the_hash_table() {
        let names: Vec<String> = (0..1000).map(|number| format!("cublas{number}")).collect();
        let plan = ForwarderPlan::new("libcublas.so.12", &NeededFunctions::new(), names.iter().map(String::as_str));
        assert!(plan.functions.is_sorted_by_key(|function| function.hash % plan.buckets));
        assert_eq!(plan.functions.len(), 1000);
        assert_eq!(plan.write().unwrap(), plan.write().unwrap(), "the same plan is the same file");
    }

    #[test]
    fn two_versions_stay_apart() {
        let function = |name: &str, version: &str| (name.to_owned(), Some(version.to_owned()));
        let needed = NeededFunctions::from([function("a", "V_1"), function("b", "V_2")]);
        let plan = ForwarderPlan::new("libx.so.1", &needed, ["c"]);
        let version = |name: &str| plan.functions.iter().find(|one| one.name == name).unwrap().version;
        assert_eq!((version("a"), version("b"), version("c")), (Some(0), Some(1), None));
        assert!(plan.write().is_ok());
    }

    #[test]
    fn a_library_without_functions_is_written() {
        assert!(ForwarderPlan::new("libcuda.so.1", &NeededFunctions::new(), []).write().is_ok());
    }
}
