//! What PyTorch's libraries need from NVIDIA's: file names, functions and their versions, read from the files.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use object::{
    LittleEndian, ReadCache, ReadRef, SymbolIndex,
    elf::{self, FileHeader64},
    read::elf::{FileHeader as _, Sym as _, VersionIndex},
};

use oomph_shadow::{
    forwarder::NeededFunctions,
    functions::{LibraryFamily, family_of},
    needed_libraries,
};

/// Libraries that programs open by name, so that no file lists them.
const OPENED_BY_NAME: [&str; 2] = ["libcuda.so.1", "libnvidia-ml.so.1"];
/// A function that is in no table belongs to the family with the most similar name, from this many letters on.
const LEAST_COMMON_LETTERS: usize = 4;

/// How deep the packages beside PyTorch are searched for extensions, and how many files are read.
const DEEPEST_FOLDER: usize = 5;
const MOST_FILES: usize = 20_000;

/// Why the needs of a PyTorch are unknown.
#[derive(Debug, thiserror::Error)]
pub enum NeedsError {
    /// There is no PyTorch.
    #[error("{folder}: not a folder of PyTorch: {source}", folder = folder.display())]
    NoFolder {
        /// Which folder.
        folder: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// It was built without CUDA.
    #[error(
        "the PyTorch in {folder} is built without CUDA, so the program cannot use a GPU; install a wheel with CUDA; \
         a GPU is not needed",
        folder = folder.display()
    )]
    WithoutCuda {
        /// Its folder.
        folder: PathBuf,
    },
}

/// The functions that are needed from each library, by its file name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaNeeds {
    /// By file name, as the libraries name each other.
    pub libraries: BTreeMap<String, NeededFunctions>,
}

impl CudaNeeds {
    /// The needs of the PyTorch in a folder and of the extensions beside it.
    pub fn of_torch(folder: &Path) -> Result<CudaNeeds, NeedsError> {
        let no_folder = |source| NeedsError::NoFolder { folder: folder.to_owned(), source };
        let own = [folder.join("lib"), folder.to_owned()];
        let mut needs = CudaNeeds::default();
        for place in &own {
            for file in shared_libraries(place).map_err(no_folder)? {
                needs.add_file(&file);
            }
        }
        if needs.libraries.is_empty() {
            return Err(NeedsError::WithoutCuda { folder: folder.to_owned() });
        }
        let mut left = MOST_FILES;
        if let Some(packages) = folder.parent() {
            needs.add_extensions(packages, folder, DEEPEST_FOLDER, &mut left);
        }
        for soname in OPENED_BY_NAME {
            needs.libraries.entry(soname.to_owned()).or_default();
        }
        Ok(needs)
    }

    /// Files that cannot be read, or are of another kind, need nothing.
    fn add_file(&mut self, file: &Path) {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        // Libraries of NVIDIA that lie in the wheel are replaced, so their needs do not matter.
        if name.starts_with("libcudnn") || family_of(&name).is_some() {
            return;
        }
        if let Ok(opened) = File::open(file) {
            let cache = ReadCache::new(opened);
            let _ = self.add(&cache);
        }
    }

    /// Adds the needs of one file.
    fn add<'data>(&mut self, data: impl ReadRef<'data>) -> object::Result<()> {
        let header = FileHeader64::<LittleEndian>::parse(data)?;
        let endian = header.endian()?;
        let sections = header.sections(endian, data)?;
        let sonames: BTreeSet<String> =
            needed_libraries(data)?.into_iter().filter(|name| family_of(name).is_some()).collect();
        if sonames.is_empty() {
            return Ok(());
        }
        let symbols = sections.symbols(endian, data, elf::SHT_DYNSYM)?;
        let versions = sections.versions(endian, data)?;
        let strings = symbols.strings();
        for (place, symbol) in symbols.iter().enumerate() {
            if !symbol.is_undefined(endian) || symbol.st_bind() == elf::STB_LOCAL {
                continue;
            }
            let Ok(name) = std::str::from_utf8(symbol.name(endian, strings)?) else { continue };
            let version = match &versions {
                Some(versions) => {
                    let index: VersionIndex = versions.version_index(endian, SymbolIndex(place));
                    versions.version(index)?
                }
                None => None,
            };
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            match version.and_then(|version| Some((text(version.file()?), text(version.name())))) {
                Some((file, version)) if sonames.contains(&file) => self.need(&file, name, Some(version)),
                Some(_) => {}
                None => {
                    if let Some(soname) = owner(name, &sonames) {
                        self.need(soname, name, None);
                    }
                }
            }
        }
        for soname in sonames {
            self.libraries.entry(soname).or_default();
        }
        Ok(())
    }

    fn need(&mut self, soname: &str, name: &str, version: Option<String>) {
        let known = self.libraries.entry(soname.to_owned()).or_default().entry(name.to_owned()).or_default();
        if known.is_none() {
            *known = version;
        }
    }

    /// The extensions among the packages in a folder. Packages that are no extensions need nothing of NVIDIA.
    fn add_extensions(&mut self, folder: &Path, torch: &Path, depth: usize, left: &mut usize) {
        for file in shared_libraries(folder).unwrap_or_default() {
            if *left == 0 {
                return;
            }
            *left -= 1;
            self.add_file(&file);
        }
        let Some(depth) = depth.checked_sub(1) else { return };
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let skipped = path == torch || ["nvidia", "__pycache__"].iter().any(|name| entry.file_name() == *name);
            if !skipped && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                self.add_extensions(&path, torch, depth, left);
            }
        }
    }
}

/// The library that a function without a version comes from: the one that has it, otherwise the one with the most similar
/// name.
fn owner<'a>(name: &str, sonames: &'a BTreeSet<String>) -> Option<&'a str> {
    // A name of C++: PyTorch has tens of thousands, NVIDIA's libraries have C names.
    if name.starts_with("_Z") {
        return None;
    }
    let similar = |soname: &&String| family_of(soname).map_or(0, |family| common_letters(name, family));
    let best = sonames.iter().max_by_key(similar)?;
    (similar(&best) >= LEAST_COMMON_LETTERS).then_some(best.as_str())
}

/// How many letters the name has in common with the beginning of a function of the family; one more for the whole name.
fn common_letters(name: &str, family: &LibraryFamily) -> usize {
    let common = |function: &str| name.bytes().zip(function.bytes()).take_while(|(one, other)| one == other).count();
    let all = family.functions().map(|line| common(line.name) + usize::from(line.name == name));
    all.max().unwrap_or(0)
}

/// The shared libraries directly in a folder, in the order of their names. Links to the same file are read twice, which
/// changes nothing.
fn shared_libraries(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if (name.ends_with(".so") || name.contains(".so.")) && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use oomph_shadow::forwarder::ForwarderPlan;

    /// A library that defines one function and needs `liboomph_shadow.so` alone is no user of CUDA.
    #[test]
    fn folders_without_cuda_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let torch = folder.path().join("torch");
        let missing = CudaNeeds::of_torch(&torch).unwrap_err().to_string();
        assert!(missing.contains("not a folder of PyTorch"), "{missing}");
        fs::create_dir_all(torch.join("lib")).unwrap();
        let library =
            ForwarderPlan::new("libc10.so", &NeededFunctions::from([("f".to_owned(), None)]), []).write().unwrap();
        fs::write(torch.join("lib/libc10.so"), library).unwrap();
        fs::write(torch.join("lib/libtext.so"), "not a library").unwrap();
        let cpu_only = CudaNeeds::of_torch(&torch).unwrap_err().to_string();
        assert!(cpu_only.contains("is built without CUDA"), "{cpu_only}");
    }

    #[test]
    fn functions_without_a_version_go_to_the_library_of_their_prefix() {
        let sonames = ["libcublas.so.12", "libcublasLt.so.12", "libnccl.so.2"].map(str::to_owned).into();
        assert_eq!(owner("ncclSend", &sonames), Some("libnccl.so.2"));
        assert_eq!(owner("cublasLtMatmul", &sonames), Some("libcublasLt.so.12"));
        assert_eq!(owner("cublasSgemm", &sonames), Some("libcublas.so.12"));
        assert_eq!(owner("_ZN2at6TensorE", &sonames), None);
    }

    #[test]
    fn the_first_version_of_a_function_stays() {
        let mut needs = CudaNeeds::default();
        needs.need("libcudart.so.13", "cudaMalloc", None);
        needs.need("libcudart.so.13", "cudaMalloc", Some("libcudart.so.13".to_owned()));
        needs.need("libcudart.so.13", "cudaMalloc", None);
        assert_eq!(needs.libraries["libcudart.so.13"]["cudaMalloc"].as_deref(), Some("libcudart.so.13"));
    }
}
