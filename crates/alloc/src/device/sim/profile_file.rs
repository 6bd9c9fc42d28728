//! A profile as a file: what `doctor --calibrate` writes and `--device sim:PATH` reads.

use std::{fs, path::Path, sync::Arc};

use serde::{Deserialize, Serialize};

use super::{Cost, CostTable, Profile, Rates, SimConfigError, WorkTable, WorkTime};

/// A profile in TOML. Costs are by call and size, as they were measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileFile {
    /// What to call it.
    pub name: String,
    /// What the vendor calls it.
    pub vendor_name: String,
    /// The driver under which it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Memory in all.
    pub total_bytes: u64,
    /// Taken by the context before the first allocation.
    pub context_bytes: u64,
    /// Taken by the libraries that the first matrix product loads, their workspace left out.
    pub library_bytes: u64,
    /// What the library works in beside that, for each stream, for people to see.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_bytes: Option<u64>,
    /// What of the context are the kernels of this program, for people to see.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_bytes: Option<u64>,
    /// Physical memory is handed out in pages of this size.
    pub page_bytes: u64,
    /// What sizes and addresses of virtual memory must be multiples of.
    pub granularity_bytes: u64,
    /// How many allocations of 512 bytes were seen to share a page, for people to see.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub small_allocations_per_page: Option<u64>,
    /// How fast work is in general.
    pub rates: Rates,
    /// How long work took.
    #[serde(default)]
    pub work: Vec<WorkTime>,
    /// What driver calls cost.
    pub cost: Vec<Cost>,
}

impl ProfileFile {
    /// Reads a profile.
    pub fn load(path: &Path) -> Result<Profile, SimConfigError> {
        let bad = |reason: String| SimConfigError::BadProfile { path: path.display().to_string(), reason };
        let text = fs::read_to_string(path).map_err(|error| bad(error.to_string()))?;
        ProfileFile::parse(&text).map_err(bad)
    }

    /// The file's text.
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        toml::to_string_pretty(self)
    }

    /// Reads a profile's text; why it is none, in words.
    pub(in crate::device) fn parse(text: &str) -> Result<Profile, String> {
        let file: ProfileFile = toml::from_str(text).map_err(|error| error.to_string())?;
        if !file.rates.are_possible() {
            return Err("a rate is not a positive number".to_owned());
        }
        Ok(Profile {
            name: file.name.into(),
            vendor_name: file.vendor_name.into(),
            total_bytes: file.total_bytes,
            context_bytes: file.context_bytes,
            library_bytes: file.library_bytes,
            page_bytes: file.page_bytes,
            granularity_bytes: file.granularity_bytes,
            costs: Arc::new(CostTable::of(file.cost).map_err(|error| error.to_string())?),
            rates: file.rates,
            work: Arc::new(WorkTable::of(file.work).map_err(|error| error.to_string())?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::CallKind;
    use oomph_base::{Dtype, MIB, Nanos, ProductRole, Work};

    const PRODUCT: Work =
        Work::Gemm { m: 512, n: 512, k: 512, batch: 1, dtype: Dtype::Bf16, role: ProductRole::Output };

    fn file() -> ProfileFile {
        ProfileFile {
            name: "small".to_owned(),
            vendor_name: "A small GPU".to_owned(),
            driver: Some("CUDA 13.0".to_owned()),
            total_bytes: 1 << 33,
            context_bytes: 300 * MIB,
            library_bytes: 0,
            page_bytes: 2 * MIB,
            granularity_bytes: 2 * MIB,
            workspace_bytes: Some(32 * MIB),
            kernel_bytes: Some(0),
            small_allocations_per_page: Some(4096),
            rates: Profile::h200().rates,
            work: vec![WorkTime { median_us: 80.0, p99_us: Some(90.0), work: PRODUCT }],
            cost: vec![Cost { call: "cuMemAlloc".to_owned(), bytes: 512, median_us: 3.5, p99_us: Some(9.0) }],
        }
    }

    #[test]
    fn a_profile_that_was_written_is_read_back() {
        let profile = ProfileFile::parse(&file().to_toml().unwrap()).unwrap();
        assert_eq!((profile.name.as_ref(), profile.total_bytes), ("small", 1 << 33));
        assert_eq!(profile.rates, Profile::h200().rates);
        assert_eq!(profile.duration(&PRODUCT), Nanos(80_000));
        assert_eq!(profile.costs.cost(CallKind::MemAlloc, 512), Nanos(3_500));
    }

    #[test]
    fn a_profile_from_before_work_was_measured_is_still_read() {
        let text = r#"
            name = "old"
            vendor_name = "An old GPU"
            total_bytes = 8589934592
            context_bytes = 314572800
            library_bytes = 0
            page_bytes = 2097152
            granularity_bytes = 2097152

            [rates]
            f32_flops_per_ns = 67000.0
            tf32_flops_per_ns = 494500.0
            half_flops_per_ns = 989000.0
            memory_bytes_per_ns = 3900.0
            pinned_copy_bytes_per_ns = 55.0
            pageable_copy_in_bytes_per_ns = 11.0
            pageable_copy_out_bytes_per_ns = 15.0
            kernel_floor_ns = 3826

            [[cost]]
            call = "cuMemAlloc"
            bytes = 512
            median_us = 30.666
        "#;
        let profile = ProfileFile::parse(text).unwrap();
        assert_eq!(profile.rates.pinned_copy_in_bytes_per_ns, 55.0);
        assert_eq!(profile.rates.pinned_copy_out_bytes_per_ns, 55.0);
        assert_eq!(profile.duration(&PRODUCT), profile.rates.duration(&PRODUCT));
    }

    #[test]
    fn a_bad_profile_is_refused_in_words() {
        let refused = |change: fn(&mut ProfileFile)| {
            let mut bad = file();
            change(&mut bad);
            ProfileFile::parse(&bad.to_toml().unwrap()).unwrap_err()
        };
        assert!(refused(|file| file.cost[0].call = "cuMemAlok".to_owned()).contains("unknown call 'cuMemAlok'"));
        assert!(refused(|file| file.work[0].median_us = -1.0).contains("-1 us for Gemm"));
        assert!(refused(|file| file.rates.memory_bytes_per_ns = 0.0).contains("not a positive number"));
        assert!(ProfileFile::parse("name = 3").unwrap_err().contains("line 1"));
        let missing = ProfileFile::load(Path::new("no/such/profile.toml")).unwrap_err().to_string();
        assert!(missing.starts_with("the profile no/such/profile.toml cannot be used"), "{missing}");
    }
}
