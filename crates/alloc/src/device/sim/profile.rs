//! Which GPU is simulated, and how the command line names it.

use std::{
    borrow::Cow,
    path::Path,
    str::FromStr,
    sync::{Arc, LazyLock},
};

use super::{
    ProfileFile,
    address_space::{RANGE_BYTES, SHARE_BYTES},
    compute::Rates,
    costs::CostTable,
    work_times::WorkTable,
};
use oomph_base::{Bytes, ParseBytesError, did_you_mean, nearest};

/// Everything that makes one GPU differ from another.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// What to call it on the command line.
    pub name: Cow<'static, str>,
    /// What the vendor calls it.
    pub vendor_name: Cow<'static, str>,
    /// Memory in all.
    pub total_bytes: u64,
    /// Taken by the context before the first allocation.
    pub context_bytes: u64,
    /// Taken by the libraries that the first matrix product loads.
    pub library_bytes: u64,
    /// Physical memory is handed out in pages of this size.
    pub page_bytes: u64,
    /// What sizes and addresses of virtual memory must be multiples of.
    pub granularity_bytes: u64,
    /// What driver calls cost.
    pub costs: Arc<CostTable>,
    /// How fast work is in general.
    pub rates: Rates,
    /// How long work was measured to take.
    pub work: Arc<WorkTable>,
}

impl Profile {
    /// The names of all profiles.
    pub const NAMES: &'static [&'static str] = &["h200"];

    /// An NVIDIA H200, driver CUDA 13.0, as `h200.toml` tells. The real one refuses a single allocation of the last
    /// 4 MiB; this one does not.
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

/// A GPU to simulate: a profile, perhaps with another amount of memory.
#[derive(Clone, Debug, PartialEq)]
pub struct SimConfig {
    /// Which GPU.
    pub profile: Profile,
    /// Memory in all, where it is not the profile's.
    pub capacity_bytes: Option<u64>,
}

impl SimConfig {
    /// Memory in all.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.capacity_bytes.unwrap_or(self.profile.total_bytes)
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

/// Why there is no such simulated device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SimConfigError {
    /// Not enough memory for the driver itself.
    #[error(
        "a simulated device of {} is too small: its context alone takes {}",
        Bytes(*.capacity_bytes), Bytes(*.context_bytes)
    )]
    TooSmall {
        /// Memory in all.
        capacity_bytes: u64,
        /// What the context takes.
        context_bytes: u64,
    },
    /// Pages that do not fit together.
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
    #[error("'{0}' is not a simulated device; write sim, sim:80GiB or sim:h200")]
    NotSimulated(String),
    /// The text after `sim:` starts like a size and is none.
    #[error("in 'sim:': {0}")]
    Size(#[from] ParseBytesError),
    /// The text after `sim:` is neither a size nor a profile.
    #[error("there is no profile '{name}' among {}, nor a file of that name{}", Profile::NAMES.join(", "), did_you_mean(.nearest.as_deref()))]
    UnknownProfile {
        /// What was typed.
        name: String,
        /// The nearest right name.
        nearest: Option<String>,
    },
    /// The file after `sim:` is not a profile.
    #[error("the profile {path} cannot be used: {reason}")]
    BadProfile {
        /// Which file.
        path: String,
        /// Why.
        reason: String,
    },
}

impl FromStr for SimConfig {
    type Err = SimConfigError;

    /// Reads `sim`, `sim:SIZE`, `sim:PROFILE` or `sim:PATH` of a profile that `doctor --calibrate` wrote.
    ///
    /// ```
    /// use oomph_alloc::device::sim::SimConfig;
    /// assert_eq!("sim:80GiB".parse::<SimConfig>().unwrap().total_bytes(), 80 << 30);
    /// ```
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let config = match text.strip_prefix("sim") {
            Some("") => SimConfig::default(),
            Some(rest) => match rest.strip_prefix(':') {
                Some(size) if size.starts_with(|c: char| c.is_ascii_digit() || c == '-') => {
                    SimConfig { capacity_bytes: Some(size.parse::<Bytes>()?.0), ..SimConfig::default() }
                }
                Some(name) => match Profile::named(name) {
                    Some(profile) => profile.into(),
                    None if Path::new(name).is_file() => ProfileFile::load(Path::new(name))?.into(),
                    None => {
                        let nearest = nearest(name, Profile::NAMES.iter().copied());
                        return Err(SimConfigError::UnknownProfile { name: name.to_owned(), nearest });
                    }
                },
                None => return Err(SimConfigError::NotSimulated(text.to_owned())),
            },
            None => return Err(SimConfigError::NotSimulated(text.to_owned())),
        };
        config.check()?;
        Ok(config)
    }
}

impl SimConfig {
    /// Whether such a device can be.
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

#[cfg(test)]
mod tests {
    use super::*;
    use oomph_base::{GIB, MIB};

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
    fn what_cannot_be_simulated_is_refused_in_words() {
        let context = Bytes(Profile::h200().context_bytes);
        assert_eq!(
            refusal("sim:0"),
            format!("a simulated device of 0 B is too small: its context alone takes {context}")
        );
        assert!(refusal("sim:100MiB").contains("of 100 MiB is too small"));
        assert!(refusal("sim:-5").contains("not an amount of memory"));
        assert!(refusal("sim:5parsecs").contains("not an amount of memory"));
        assert_eq!(
            refusal("sim:h20"),
            "there is no profile 'h20' among h200, nor a file of that name; did you mean 'h200'?"
        );
        assert!(refusal("sim:").contains("there is no profile ''"));
        assert!(refusal("cuda:0").contains("not a simulated device"));
        assert!(refusal("simple").contains("not a simulated device"));
    }
}
