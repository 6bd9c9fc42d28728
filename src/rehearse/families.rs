//! NVIDIA's libraries, known by their file names and by the first letters of their functions.

/// One library of NVIDIA, in all its releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvidiaLibrary {
    /// Its name in the table of functions.
    pub name: &'static str,
    /// How its file names begin, up to the first `.` or `-`.
    stem: &'static str,
    /// How the names of its functions begin. A name belongs to the family with the longest one.
    prefixes: &'static [&'static str],
}

const fn family(
    name: &'static str,
    stem: &'static str,
    prefixes: &'static [&'static str],
) -> NvidiaLibrary {
    NvidiaLibrary { name, stem, prefixes }
}

/// All of them.
pub const FAMILIES: &[NvidiaLibrary] = &[
    family("cudart", "libcudart", &["cuda", "__cuda"]),
    family("cuda", "libcuda", &["cu"]),
    family("cublas", "libcublas", &["cublas"]),
    family("cublasLt", "libcublasLt", &["cublasLt"]),
    family("cudnn", "libcudnn", &["cudnn"]),
    family("nccl", "libnccl", &["nccl", "pnccl"]),
    family("cusparse", "libcusparse", &["cusparse"]),
    family("cusparseLt", "libcusparseLt", &["cusparseLt"]),
    family("cusolver", "libcusolver", &["cusolver"]),
    family("cusolverMg", "libcusolverMg", &["cusolverMg"]),
    family("cufft", "libcufft", &["cufft"]),
    family("curand", "libcurand", &["curand"]),
    family("nvrtc", "libnvrtc", &["nvrtc"]),
    family("cupti", "libcupti", &["cupti"]),
    family("nvml", "libnvidia-ml", &["nvml"]),
    family("nvJitLink", "libnvJitLink", &["nvJitLink", "__nvJitLink"]),
    family("nvToolsExt", "libnvToolsExt", &["nvtx"]),
    family("nvshmem", "libnvshmem_host", &["nvshmem"]),
    family("cufile", "libcufile", &["cuFile"]),
];

/// Libraries that programs open by name, so that no file lists them.
pub const OPENED_BY_NAME: [&str; 2] = ["libcuda.so.1", "libnvidia-ml.so.1"];

impl NvidiaLibrary {
    /// The family of a file name. Wheels rename bundled libraries: `libcusparseLt-f80c68d1.so.0`.
    #[must_use]
    pub fn of_soname(soname: &str) -> Option<&'static NvidiaLibrary> {
        FAMILIES.iter().find(|family| {
            let rest = soname.strip_prefix(family.stem);
            rest.is_some_and(|rest| rest.starts_with(".so") || has_hash(rest))
        })
    }

    /// The family among these whose functions begin like this name.
    pub fn of_function<'a>(
        name: &str,
        among: impl IntoIterator<Item = &'a NvidiaLibrary>,
    ) -> Option<&'a NvidiaLibrary> {
        let length =
            |family: &NvidiaLibrary| family.prefixes.iter().filter(|start| name.starts_with(**start)).map(|start| start.len()).max();
        among.into_iter().filter_map(|family| Some((length(family)?, family))).max_by_key(|(length, _)| *length).map(|(_, family)| family)
    }
}

/// Whether this is the rest of a renamed library: `-`, hexadecimal digits, `.so`.
fn has_hash(rest: &str) -> bool {
    let hash = rest.strip_prefix('-').and_then(|rest| rest.split_once(".so"));
    hash.is_some_and(|(hash, _)| !hash.is_empty() && hash.bytes().all(|digit| digit.is_ascii_hexdigit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_tell_the_family() {
        let name = |soname| NvidiaLibrary::of_soname(soname).map(|family| family.name);
        assert_eq!(name("libcudart.so.13"), Some("cudart"));
        assert_eq!(name("libcudart-d0da41ae.so.11.0"), Some("cudart"));
        assert_eq!(name("libcusparseLt-f80c68d1.so.0"), Some("cusparseLt"));
        assert_eq!(name("libcuda.so.1"), Some("cuda"));
        assert_eq!(name("libnvidia-ml.so.1"), Some("nvml"));
        for other in ["libcudnn_cnn.so.9", "libc.so.6", "libtorch_cuda.so", "libcudart-static.so.1", "libcuda-.so"] {
            assert_eq!(name(other), None, "{other}");
        }
    }

    #[test]
    fn functions_belong_to_the_longest_prefix() {
        let name = |function| NvidiaLibrary::of_function(function, FAMILIES).map(|family| family.name);
        for (function, family) in [
            ("cudaMalloc", "cudart"),
            ("__cudaRegisterFunction", "cudart"),
            ("cuMemCreate", "cuda"),
            ("cuFileRead", "cufile"),
            ("cublasLtMatmul", "cublasLt"),
            ("cusparseLtInit", "cusparseLt"),
            ("ncclAllReduce", "nccl"),
            ("nvshmemx_init_attr", "nvshmem"),
        ] {
            assert_eq!(name(function), Some(family), "{function}");
        }
        assert_eq!(name("memcpy"), None);
    }
}
