//! The functions of NVIDIA's libraries, with their out-parameters.
//!
//! One text file per library family, made by `tools/shadow/headers.py` from NVIDIA's public headers; its documentation has
//! the format. The forwarders take the names from here, the shared library takes what each function must write. Both
//! include this file, so it has no dependencies.

/// A library family: one table for all of its releases.
#[derive(Clone, Copy, Debug)]
pub struct LibraryFamily {
    /// The name without `lib` and without a version: `cublasLt`.
    pub name: &'static str,
    /// The beginnings of its sonames.
    pub sonames: &'static [&'static str],
    /// One line per function.
    table: &'static str,
}

/// What a function does with one of its arguments. Positions count words: 0 to 5 are the integer registers, 6 and up are
/// words on the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FunctionArgument {
    /// Writes a pointer that is not null.
    Handle(u8),
    /// Writes a handle of 4 bytes that is not 0.
    SmallHandle(u8),
    /// Writes a pointer to an empty text.
    Text(u8),
    /// Writes that many zero bytes.
    Zeros(u16, u8),
    /// Writes an empty text into a buffer; the length is at the second position.
    TextBuffer(u8, u8),
    /// Writes zeros into a buffer; the length is at the second position.
    Buffer(u8, u8),
    /// A pointer that is only read, or whose use is not known.
    Pointer(u8),
    /// The function returns a text.
    ReturnsText,
}

/// One line of a table.
#[derive(Clone, Copy, Debug)]
pub struct FunctionLine {
    /// The name of the symbol.
    pub name: &'static str,
    rest: &'static str,
}

impl FunctionLine {
    /// The arguments that are pointers.
    pub fn arguments(&self) -> impl Iterator<Item = FunctionArgument> {
        self.rest.split(' ').filter_map(parse_argument)
    }

    /// How many words the arguments take.
    pub fn words(&self) -> u8 {
        self.rest.rsplit('/').next().and_then(|count| count.parse().ok()).unwrap_or(0)
    }
}

fn parse_argument(text: &str) -> Option<FunctionArgument> {
    let kind = text.chars().next()?;
    let (first, second) = text[1..].split_once(':').unwrap_or((&text[1..], "0"));
    let second = second.parse::<u8>().unwrap_or(0);
    let position = first.parse::<u8>().unwrap_or(0);
    Some(match kind {
        'h' => FunctionArgument::Handle(position),
        'i' => FunctionArgument::SmallHandle(position),
        't' => FunctionArgument::Text(position),
        'z' => FunctionArgument::Zeros(first.parse().ok()?, second),
        'c' => FunctionArgument::TextBuffer(position, second),
        'b' => FunctionArgument::Buffer(position, second),
        'p' => FunctionArgument::Pointer(position),
        'r' => FunctionArgument::ReturnsText,
        _ => return None,
    })
}

impl LibraryFamily {
    /// All functions, sorted by name.
    pub fn functions(&self) -> impl Iterator<Item = FunctionLine> {
        self.table.lines().filter(|line| !line.starts_with('#')).map(|line| {
            let (name, rest) = line.split_once(' ').unwrap_or((line, ""));
            FunctionLine { name, rest }
        })
    }
}

macro_rules! families {
    ($($name:literal $file:literal [$($soname:literal),+];)+) => {
        /// All families. A soname belongs to the family with the longest matching beginning.
        pub const FAMILIES: &[LibraryFamily] = &[$(LibraryFamily {
            name: $name,
            sonames: &[$($soname),+],
            table: include_str!($file),
        }),+];
    };
}

families! {
    "cudart" "cudart.txt" ["libcudart"];
    "cuda" "cuda.txt" ["libcuda"];
    "cublas" "cublas.txt" ["libcublas"];
    "cublasLt" "cublasLt.txt" ["libcublasLt"];
    "cudnn" "cudnn.txt" ["libcudnn"];
    "nccl" "nccl.txt" ["libnccl"];
    "cusparse" "cusparse.txt" ["libcusparse"];
    "cusparseLt" "cusparseLt.txt" ["libcusparseLt"];
    "cusolver" "cusolver.txt" ["libcusolver"];
    "cufft" "cufft.txt" ["libcufft"];
    "curand" "curand.txt" ["libcurand"];
    "nvrtc" "nvrtc.txt" ["libnvrtc"];
    "cupti" "cupti.txt" ["libcupti"];
    "nvml" "nvml.txt" ["libnvidia-ml"];
    "nvJitLink" "nvJitLink.txt" ["libnvJitLink"];
    "nvToolsExt" "nvToolsExt.txt" ["libnvToolsExt"];
    "nvshmem" "nvshmem.txt" ["libnvshmem"];
    "cufile" "cufile.txt" ["libcufile"];
}

/// The family of a library, by its soname. `libcusparseLt-f80c68d1.so.0` is a name that a wheel's build tool made.
pub fn family_of(soname: &str) -> Option<&'static LibraryFamily> {
    let stem = soname.split(".so").next().unwrap_or(soname);
    let length = |family: &LibraryFamily| {
        let fits = |name: &&&str| {
            stem.strip_prefix(**name).is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_alphabetic()))
        };
        family.sonames.iter().filter(fits).map(|name| name.len()).max()
    };
    FAMILIES
        .iter()
        .filter_map(|family| Some((length(family)?, family)))
        .max_by_key(|(length, _)| *length)
        .map(|(_, family)| family)
}
