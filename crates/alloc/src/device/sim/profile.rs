//! Which GPU is simulated ([`Profile`], [`SimConfig`]), and profiles as files: what `doctor
//! --calibrate` writes and `--card PATH` reads.

use std::{
    borrow::Cow,
    path::Path,
    str::FromStr,
    sync::{Arc, LazyLock},
};

use serde::{Deserialize, Serialize};

use super::super::CardFacts;
use super::{
    costs::{Cost, CostTable},
    work_times::{ClearingRates, Rates, WorkTable, WorkTime},
};
use oomph_base::{Bytes, TypedSizeError, did_you_mean, nearest, parse_toml, read_text_file};
use oomph_driver::{RANGE_BYTES, SHARE_BYTES};

/// Everything that makes one GPU differ from another.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// Its name on the command line.
    pub name: Cow<'static, str>,
    /// The vendor's name.
    pub vendor_name: Cow<'static, str>,
    /// Total memory.
    pub total_bytes: u64,
    /// Taken by the context before the first allocation.
    pub context_bytes: u64,
    /// Taken by the libraries that the first matrix product loads.
    pub library_bytes: u64,
    /// Physical memory comes in pages of this size.
    pub page_bytes: u64,
    /// What sizes and addresses of virtual memory must be multiples of.
    pub granularity_bytes: u64,
    /// How many pieces of work a stream holds that are not done. The host waits before it queues one more.
    pub launch_queue: usize,
    /// What driver calls cost.
    pub costs: Arc<CostTable>,
    /// How fast work is in general.
    pub rates: Rates,
    /// How the driver clears memory, where that is known.
    pub clearing: Option<ClearingRates>,
    /// How long work was measured to take.
    pub work: Arc<WorkTable>,
}

impl Profile {
    /// An NVIDIA H200 with driver CUDA 13.0, from `h200.toml`. The real one refuses an allocation
    /// of the last 4 MiB; this one does not.
    #[must_use]
    pub fn h200() -> Profile {
        #[expect(clippy::expect_used, reason = "the profile is part of this crate, and every test reads it")]
        static PROFILE: LazyLock<Profile> = LazyLock::new(|| {
            ProfileFile::parse(include_str!("h200.toml")).expect("the committed profile is well formed")
        });
        PROFILE.clone()
    }

    /// The profile of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Profile> {
        match name {
            "h200" => Some(Profile::h200()),
            _ => None,
        }
    }
}

/// A GPU to simulate: a profile, possibly with another amount of memory.
#[derive(Clone, Debug, PartialEq)]
pub struct SimConfig {
    /// Which GPU.
    pub profile: Profile,
    /// Total memory, if it is not the profile's.
    pub capacity_bytes: Option<u64>,
}

impl SimConfig {
    /// Total memory.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.capacity_bytes.unwrap_or(self.profile.total_bytes)
    }

    /// The GPU that a card is: a size, or the name of a card, which has that card's memory and the times of the H200; or
    /// the file of a profile.
    ///
    /// ```
    /// use oomph_alloc::device::sim::SimConfig;
    /// assert_eq!(SimConfig::of_card("24GiB").unwrap().total_bytes(), 24 << 30);
    /// assert_eq!(SimConfig::of_card("h200"), Ok(SimConfig::default()));
    /// ```
    pub fn of_card(text: &str) -> Result<SimConfig, SimConfigError> {
        let config = match Profile::named(text) {
            Some(profile) => profile.into(),
            None if Path::new(text).is_file() => ProfileFile::load(Path::new(text))?.into(),
            None if text.starts_with(|c: char| c.is_ascii_digit() || c == '-') => {
                SimConfig { capacity_bytes: Some(Bytes::typed(text)?.0), ..SimConfig::default() }
            }
            None => match CardFacts::named(text) {
                Some(card) => SimConfig { capacity_bytes: Some(card.total_bytes()), ..SimConfig::default() },
                None => {
                    let names = CardFacts::all().iter().map(|card| card.name.as_str());
                    let nearest = nearest(&text.to_ascii_lowercase(), names);
                    return Err(SimConfigError::UnknownCard { name: text.to_owned(), nearest });
                }
            },
        };
        config.check()?;
        Ok(config)
    }

    /// Checks that such a device is possible.
    pub(super) fn check(&self) -> Result<(), SimConfigError> {
        let Profile { context_bytes, page_bytes, granularity_bytes, .. } = self.profile;
        let capacity_bytes = self.total_bytes();
        if capacity_bytes == 0 || capacity_bytes < context_bytes {
            return Err(SimConfigError::TooSmall { capacity_bytes, context_bytes });
        }
        let steps = [SHARE_BYTES, page_bytes, granularity_bytes, RANGE_BYTES];
        if steps.windows(2).any(|pair| pair[0] == 0 || !pair[1].is_multiple_of(pair[0])) {
            return Err(SimConfigError::OddPages { page_bytes, granularity_bytes });
        }
        Ok(())
    }
}

impl From<Profile> for SimConfig {
    fn from(profile: Profile) -> Self {
        SimConfig { profile, capacity_bytes: None }
    }
}

impl Default for SimConfig {
    fn default() -> Self {
        Profile::h200().into()
    }
}

/// Why a simulated device cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SimConfigError {
    /// Not enough memory for the driver itself.
    #[error(
        "a simulated device of {} is too small: its context alone takes {}",
        Bytes(*.capacity_bytes), Bytes(*.context_bytes)
    )]
    TooSmall {
        /// Total memory.
        capacity_bytes: u64,
        /// What the context takes.
        context_bytes: u64,
    },
    /// Page sizes that do not divide each other.
    #[error(
        "pages of {page_bytes} bytes and a granularity of {granularity_bytes} bytes: \
         both must divide 32 MiB, and 512 bytes the page, and the page the granularity"
    )]
    OddPages {
        /// Size of a page.
        page_bytes: u64,
        /// Granularity of virtual memory.
        granularity_bytes: u64,
    },
    /// The text names another kind of device.
    #[error("'{0}' is not a simulated device; write sim")]
    NotSimulated(String),
    /// The card starts like a size but is not one.
    #[error(transparent)]
    Size(#[from] TypedSizeError),
    /// The card is neither a size nor a profile.
    #[error(
        "unknown card '{name}': write a size such as 24GiB, a name ({}) or the file of a profile{}",
        card_names(), did_you_mean(.nearest.as_deref())
    )]
    UnknownCard {
        /// What was typed.
        name: String,
        /// The nearest right name.
        nearest: Option<String>,
    },
    /// The file is not a profile.
    #[error("the profile {path} cannot be used: {reason}")]
    BadProfile {
        /// Which file.
        path: String,
        /// Why.
        reason: String,
    },
}

/// The names of all cards, for a message.
fn card_names() -> String {
    CardFacts::all().iter().map(|card| card.name.as_str()).collect::<Vec<_>>().join(", ")
}

impl FromStr for SimConfig {
    type Err = SimConfigError;

    /// Reads `sim`, or `sim:CARD` with a card as in [`SimConfig::of_card`].
    ///
    /// ```
    /// use oomph_alloc::device::sim::SimConfig;
    /// assert_eq!("sim:80GiB".parse::<SimConfig>().unwrap().total_bytes(), 80 << 30);
    /// ```
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match (text, text.strip_prefix("sim:")) {
            ("sim", _) => Ok(SimConfig::default()),
            (_, Some(card)) => SimConfig::of_card(card),
            _ => Err(SimConfigError::NotSimulated(text.to_owned())),
        }
    }
}

/// A profile in TOML. Costs are by call and size, as they were measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileFile {
    /// Its name.
    pub name: String,
    /// The vendor's name.
    pub vendor_name: String,
    /// The driver under which it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Total memory.
    pub total_bytes: u64,
    /// Taken by the context before the first allocation.
    pub context_bytes: u64,
    /// Taken by the libraries that the first matrix product loads, their workspace left out.
    pub library_bytes: u64,
    /// What the library works in beside that, per stream, for information.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_bytes: Option<u64>,
    /// The part of the context that is the kernels of this program, for information.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_bytes: Option<u64>,
    /// Physical memory comes in pages of this size.
    pub page_bytes: u64,
    /// What sizes and addresses of virtual memory must be multiples of.
    pub granularity_bytes: u64,
    /// How many allocations of 512 bytes share a page, in older profiles; no longer measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub small_allocations_per_page: Option<u64>,
    /// How many pieces of work a stream holds that are not done. Older profiles lack it.
    #[serde(default = "usual_launch_queue")]
    pub launch_queue: usize,
    /// How fast work is in general.
    pub rates: Rates,
    /// How the driver clears memory that was given back. Older profiles lack it: copies then take as long as ever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clearing: Option<ClearingRates>,
    /// How long work took.
    #[serde(default)]
    pub work: Vec<WorkTime>,
    /// What driver calls cost.
    pub cost: Vec<Cost>,
}

/// What was measured on an H200.
fn usual_launch_queue() -> usize {
    1024
}

impl ProfileFile {
    /// Reads a profile.
    pub fn load(path: &Path) -> Result<Profile, SimConfigError> {
        let bad = |reason: String| SimConfigError::BadProfile { path: path.display().to_string(), reason };
        let text = read_text_file(path).map_err(|error| bad(error.to_string()))?;
        ProfileFile::parse(&text).map_err(bad)
    }

    /// The file's text.
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        toml::to_string_pretty(self)
    }

    /// Parses a profile's text; the error is the reason.
    pub(in crate::device) fn parse(text: &str) -> Result<Profile, String> {
        let file: ProfileFile = parse_toml(text).map_err(|error| error.to_string())?;
        let not_positive = "a rate is not a positive number";
        let rates = file.rates.checked().ok_or(not_positive)?;
        let clearing = file.clearing.map(|clearing| clearing.checked().ok_or(not_positive)).transpose()?;
        Ok(Profile {
            name: file.name.into(),
            vendor_name: file.vendor_name.into(),
            total_bytes: file.total_bytes,
            context_bytes: file.context_bytes,
            library_bytes: file.library_bytes,
            page_bytes: file.page_bytes,
            granularity_bytes: file.granularity_bytes,
            launch_queue: file.launch_queue.max(1),
            costs: Arc::new(CostTable::of(file.cost).map_err(|error| error.to_string())?),
            rates,
            clearing,
            work: Arc::new(WorkTable::of_profile(&file.work, &rates).map_err(|error| error.to_string())?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::CallKind;
    use oomph_base::{Dtype, GIB, MIB, Nanos, ProductRole, Work};

    fn refusal(text: &str) -> String {
        text.parse::<SimConfig>().unwrap_err().to_string()
    }

    #[test]
    fn devices_are_named_as_on_the_command_line() {
        let total = |text: &str| text.parse::<SimConfig>().unwrap().total_bytes();
        assert_eq!(total("sim"), 150_109_880_320);
        assert_eq!(total("sim:h200"), 150_109_880_320);
        assert_eq!(total("sim:80GiB"), 80 * GIB);
        assert_eq!(total("sim:1073741824"), GIB);
    }

    #[test]
    fn pages_must_fit_together() {
        let with = |page_bytes, granularity_bytes| {
            SimConfig::from(Profile { page_bytes, granularity_bytes, ..Profile::h200() }).check()
        };
        assert_eq!(with(2 * MIB, 4 * MIB), Ok(()));
        assert_eq!(with(512, 512), Ok(()));
        for (page_bytes, granularity_bytes) in [(0, 0), (256, 512), (2 * MIB, MIB), (2 * MIB, 0), (3 * MIB, 3 * MIB)] {
            assert_eq!(
                with(page_bytes, granularity_bytes),
                Err(SimConfigError::OddPages { page_bytes, granularity_bytes })
            );
        }
    }

    #[test]
    fn impossible_devices_are_refused() {
        let context = Bytes(Profile::h200().context_bytes);
        assert_eq!(
            refusal("sim:0"),
            format!("a simulated device of 0 B is too small: its context alone takes {context}")
        );
        assert!(refusal("sim:100MiB").contains("of 100 MiB is too small"));
        assert!(refusal("sim:-5").contains("not an amount of memory"));
        assert!(refusal("sim:5parsecs").contains("not an amount of memory"));
        let message = refusal("sim:h20");
        assert!(
            message.starts_with("unknown card 'h20': write a size such as 24GiB, a name (h200, b200, "),
            "{message}"
        );
        assert!(message.ends_with(") or the file of a profile; did you mean 'h200'?"), "{message}");
        assert!(refusal("sim:rtx409").contains("did you mean 'rtx4090'?"));
        assert!(refusal("sim:").contains("unknown card ''"));
        assert_eq!(refusal("sim:24"), "24 means 24 bytes; did you mean 24GiB? (write 24B for bytes)");
        assert!(refusal("cuda:0").contains("not a simulated device"));
        assert!(refusal("simple").contains("not a simulated device"));
    }

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
            launch_queue: 1024,
            rates: Profile::h200().rates,
            clearing: Profile::h200().clearing,
            work: vec![WorkTime { median_us: 80.0, p99_us: Some(90.0), work: PRODUCT }],
            cost: vec![Cost { call: "cuMemAlloc".to_owned(), bytes: 512, median_us: 3.5, p99_us: Some(9.0) }],
        }
    }

    #[test]
    fn a_written_profile_is_read_back() {
        let profile = ProfileFile::parse(&file().to_toml().unwrap()).unwrap();
        assert_eq!((profile.name.as_ref(), profile.total_bytes), ("small", 1 << 33));
        assert_eq!((profile.rates, profile.clearing), (Profile::h200().rates, Profile::h200().clearing));
        assert_eq!(profile.duration(&PRODUCT), Nanos(80_000));
        assert_eq!(profile.costs.cost(CallKind::MemAlloc, 512), Nanos(3_500));
    }

    #[test]
    fn older_profiles_are_read() {
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
        assert_eq!(profile.clearing, None);
        assert_eq!(profile.duration(&PRODUCT), profile.rates.duration(&PRODUCT));
    }

    #[test]
    fn invalid_profiles_are_refused() {
        let refused = |change: fn(&mut ProfileFile)| {
            let mut bad = file();
            change(&mut bad);
            ProfileFile::parse(&bad.to_toml().unwrap()).unwrap_err()
        };
        assert!(refused(|file| file.cost[0].call = "cuMemAlok".to_owned()).contains("unknown call 'cuMemAlok'"));
        assert!(refused(|file| file.work[0].median_us = -1.0).contains("-1 us for Gemm"));
        assert!(refused(|file| file.rates.memory_bytes_per_ns = 0.0).contains("not a positive number"));
        let never = Some(ClearingRates { bytes_per_ns: f64::NAN, ..Profile::h200().clearing.unwrap() });
        let bad = ProfileFile { clearing: never, ..file() };
        assert!(ProfileFile::parse(&bad.to_toml().unwrap()).unwrap_err().contains("not a positive number"));
        assert!(ProfileFile::parse("name = 3").unwrap_err().contains("line 1"));
        let missing = ProfileFile::load(Path::new("no/such/profile.toml")).unwrap_err().to_string();
        assert!(missing.starts_with("the profile no/such/profile.toml cannot be used"), "{missing}");
    }
}
