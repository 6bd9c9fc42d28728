//! The settings of the allocator and the syntax of `PYTORCH_CUDA_ALLOC_CONF`.
//!
//! Follows `ConfigTokenizer`, `AcceleratorAllocatorConfig::parseArgs` (`c10/core/AllocatorConfig`)
//! and `CUDAAllocatorConfig::parseArgs` (`c10/cuda/CUDAAllocatorConfig`). Texts that PyTorch
//! accepts by accident (a wrong separator, `40abc` for 40) are accepted too. Texts that it refuses
//! are refused with a message that names the setting.
//!
//! The name of the environment variable changed between releases. `PYTORCH_CUDA_ALLOC_CONF` is read by
//! every release and deprecated from 2.10 on. `PYTORCH_ALLOC_CONF` is read from 2.10 on: 2.9 knows the
//! name and ignores it for CUDA. Where both are set, the old one wins
//! (`AcceleratorAllocatorConfig::instance`, 2.11).

use crate::{LARGE_BUFFER, MIN_LARGE_ALLOC, ROUNDUP_INTERVALS, Release, ReleaseError, ReleaseSpan};
use oomph_base::{GIB, MIB, did_you_mean, nearest};

/// The environment variable that holds the settings of CUDA programs.
pub const CONF_VARIABLE: &str = "PYTORCH_CUDA_ALLOC_CONF";

/// The name of that variable from 2.10 on.
pub const NEW_CONF_VARIABLE: &str = "PYTORCH_ALLOC_CONF";

/// The default of `max_split_size_mb`: every block may be split.
pub const UNLIMITED: u64 = u64::MAX;

/// The settings of PyTorch's allocator that change how it places memory.
#[derive(Clone, Debug, PartialEq)]
pub struct AllocatorSettings {
    /// The release of PyTorch, which decides what the others mean and which of them exist.
    pub release: Release,
    /// Blocks of at least this size are neither split nor given to smaller requests.
    pub max_split_size: u64,
    /// How much larger such a block may be than the request it serves.
    pub max_non_split_rounding: u64,
    /// Share of the memory limit above which old cached blocks are released; 0 is off.
    pub garbage_collection_threshold: f64,
    /// Into how many steps each power of two is divided for rounding, from 1 MiB up; 0 is off.
    pub roundup_power2_divisions: [u64; ROUNDUP_INTERVALS],
    /// Whether new memory is mapped into expandable segments.
    pub expandable_segments: bool,
    /// Size of segments for requests between 1 and 10 MiB, and of the pages of large expandable
    /// segments.
    pub large_segment_size: u64,
    /// Share of the device that may be reserved. Read only when the allocator is constructed, and for
    /// `throw_on_oom`.
    pub per_process_memory_fraction: f64,
    /// A request that would take more than that share from the device fails before the driver is
    /// asked (`throw_on_cudamalloc_oom`).
    pub throw_on_oom: bool,
    /// The size of the address ranges of expandable segments (`expandable_segments_reserve`), if it
    /// is not nine eighths of the device's memory.
    pub range_reserve: Option<RangeReserve>,
    /// Settings in the text that do not change how device memory is placed.
    pub ignored: Vec<&'static str>,
}

/// The size of an address range (`ExpandableSegmentReserveSpec`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RangeReserve {
    /// A share of the device's memory.
    Share(f64),
    /// A number of GiB.
    Gibibytes(f64),
}

impl RangeReserve {
    /// The size on a device with `total` bytes.
    #[must_use]
    pub fn bytes(self, total: u64) -> u64 {
        // The conversion saturates, as PyTorch does.
        match self {
            RangeReserve::Share(share) => (share * total as f64) as u64,
            RangeReserve::Gibibytes(gibibytes) => (gibibytes * GIB as f64) as u64,
        }
    }

    /// Reads `0.5` or `40G`. PyTorch ignores any other text (`parseReserveSpec`).
    fn read(text: &str) -> Option<RangeReserve> {
        let number = text.strip_suffix(['G', 'g']);
        let value: f64 = number.unwrap_or(text).parse().ok()?;
        let kind = if number.is_some() { RangeReserve::Gibibytes } else { RangeReserve::Share };
        (value.is_finite() && value > 0.0).then(|| kind(value))
    }
}

/// A text that is not a list of settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AllocatorSettingsError {
    /// The name is unknown.
    #[error("unknown setting '{key}'{}", did_you_mean(suggestion.as_deref()))]
    UnknownKey {
        /// The name in the text.
        key: String,
        /// The most similar known name.
        suggestion: Option<String>,
    },
    /// The release does not have the setting yet.
    #[error("PyTorch {release} has no setting '{key}': it exists since {since}")]
    NotYet {
        /// The setting.
        key: &'static str,
        /// The release in which it is new.
        since: Release,
        /// The release of these settings.
        release: Release,
    },
    /// The release is not known.
    #[error(transparent)]
    UnknownRelease(#[from] ReleaseError),
    /// The text ends before the value.
    #[error("setting '{key}' has no value; write {key}:VALUE")]
    MissingValue {
        /// The setting.
        key: &'static str,
    },
    /// Another separator than the release expects.
    #[error("'{found}' where the settings need '{expected}'")]
    Separator {
        /// The right separator.
        expected: &'static str,
        /// What the text has.
        found: String,
    },
    /// A list without its closing bracket.
    #[error("the list of '{key}' is not closed by ']'")]
    OpenList {
        /// The setting.
        key: &'static str,
    },
    /// A value that the setting does not accept.
    #[error("setting '{key}': '{value}' is not {expected}")]
    BadValue {
        /// The setting.
        key: &'static str,
        /// The value in the text.
        value: String,
        /// What the setting accepts.
        expected: String,
    },
    /// Another backend.
    #[error("backend:cudaMallocAsync is another allocator: use the strategy 'async' for it")]
    OtherBackend,
}

type Parsed<T> = Result<T, AllocatorSettingsError>;

/// The settings and the release in which each is new.
const KEYS: [(&str, Release); 22] = [
    ("backend", Release::OLDEST),
    ("expandable_segments", Release::new(1)),
    ("expandable_segments_reserve", Release::new(15)),
    ("expandable_segments_reserve_by_class", Release::new(15)),
    ("garbage_collection_threshold", Release::OLDEST),
    ("graph_capture_record_stream_reuse", Release::new(9)),
    ("large_segment_size_mb", Release::new(11)),
    ("max_non_split_rounding_mb", Release::new(6)),
    ("max_split_size_mb", Release::OLDEST),
    ("per_process_memory_fraction", Release::new(10)),
    ("pinned_free_catch_all", Release::new(12)),
    ("pinned_max_cached_size_mb", Release::new(13)),
    ("pinned_max_round_threshold_mb", Release::new(13)),
    ("pinned_num_register_threads", Release::new(2)),
    ("pinned_reserve_segment_size_mb", Release::new(10)),
    ("pinned_use_background_threads", Release::new(6)),
    ("pinned_use_cuda_host_register", Release::new(2)),
    ("pinned_use_hip_host_register", Release::new(2)),
    ("release_lock_on_cudamalloc", Release::new(2)),
    ("release_lock_on_hipmalloc", Release::new(2)),
    ("roundup_power2_divisions", Release::OLDEST),
    ("throw_on_cudamalloc_oom", Release::new(12)),
];

impl Default for AllocatorSettings {
    fn default() -> Self {
        AllocatorSettings {
            release: Release::DEFAULT,
            max_split_size: UNLIMITED,
            max_non_split_rounding: LARGE_BUFFER,
            garbage_collection_threshold: 0.0,
            roundup_power2_divisions: [0; ROUNDUP_INTERVALS],
            expandable_segments: false,
            large_segment_size: LARGE_BUFFER,
            per_process_memory_fraction: 1.0,
            throw_on_oom: false,
            range_reserve: None,
            ignored: Vec::new(),
        }
    }
}

impl AllocatorSettings {
    /// The default settings of a release.
    #[must_use]
    pub fn of_release(release: Release) -> AllocatorSettings {
        AllocatorSettings { release, ..AllocatorSettings::default() }
    }

    /// Settings as users of oomph write them: those of PyTorch, and `release:2.13` for its release.
    pub fn with_release(text: &str) -> Result<AllocatorSettings, AllocatorSettingsError> {
        let mut release = Release::DEFAULT;
        let mut others = Vec::new();
        for setting in text.split(',') {
            match setting.trim().strip_prefix("release:") {
                Some(named) => release = named.parse()?,
                None => others.push(setting),
            }
        }
        AllocatorSettings::of_release(release).updated(&others.join(","))
    }

    /// These settings after PyTorch has read `text`. Settings that the text does not name are reset
    /// or kept as `AcceleratorAllocatorConfig::parseArgs` does.
    ///
    /// ```
    /// use oomph_pytorch::AllocatorSettings;
    /// let settings = AllocatorSettings::default().updated("expandable_segments:True,max_split_size_mb:128")?;
    /// let again = settings.updated("garbage_collection_threshold:0.8")?;
    /// assert!(again.expandable_segments && again.max_split_size == u64::MAX);
    /// # Ok::<(), oomph_pytorch::AllocatorSettingsError>(())
    /// ```
    pub fn updated(&self, text: &str) -> Result<AllocatorSettings, AllocatorSettingsError> {
        let tokens = tokens(text);
        let mut settings = AllocatorSettings {
            max_split_size: UNLIMITED,
            roundup_power2_divisions: [0; ROUNDUP_INTERVALS],
            garbage_collection_threshold: 0.0,
            ignored: Vec::new(),
            ..self.clone()
        };
        // The bounds of other settings depend on this one, so PyTorch reads it first.
        let strict = self.release.rules().strict_settings;
        for place in 0..tokens.len() {
            if tokens[place] == "large_segment_size_mb" {
                settings.read_one(&mut TokenReader { tokens: &tokens, place, strict })?;
            }
        }
        if settings.release.rules().resets_non_split_rounding {
            settings.max_non_split_rounding = settings.large_segment_size;
        }
        let mut reader = TokenReader { tokens: &tokens, place: 0, strict };
        while reader.place < tokens.len() {
            settings.read_one(&mut reader)?;
            reader.end_setting()?;
        }
        Ok(settings)
    }

    fn read_one(&mut self, reader: &mut TokenReader<'_>) -> Parsed<()> {
        let written = reader.tokens[reader.place].as_str();
        let Some(&(key, since)) = KEYS.iter().find(|(key, _)| *key == written) else {
            let name = written.split('=').next().unwrap_or(written);
            let suggestion = nearest(name, KEYS.map(|(key, _)| key));
            return Err(AllocatorSettingsError::UnknownKey { key: written.to_owned(), suggestion });
        };
        if since > self.release {
            return Err(AllocatorSettingsError::NotYet { key, since, release: self.release });
        }
        let least = match self.release.rules().oversize_from_segment {
            true => (self.large_segment_size / MIB, " (large_segment_size_mb)"),
            false => (LARGE_BUFFER / MIB + 1, ""),
        };
        match key {
            "max_split_size_mb" => self.max_split_size = reader.mebibytes_from(key, least)?,
            "max_non_split_rounding_mb" => self.max_non_split_rounding = reader.mebibytes_from(key, least)?,
            "large_segment_size_mb" => {
                let accepted = |mebibytes| mebibytes > MIN_LARGE_ALLOC / MIB;
                self.large_segment_size = to_bytes(reader.integer(key, "a whole number above 10", accepted)?);
            }
            "garbage_collection_threshold" => {
                self.garbage_collection_threshold =
                    reader.number(key, "a number between 0 and 1, both excluded", |x| x > 0.0 && x < 1.0)?;
            }
            "per_process_memory_fraction" => {
                self.per_process_memory_fraction =
                    reader.number(key, "a number from 0 to 1", |x| (0.0..=1.0).contains(&x))?;
            }
            "roundup_power2_divisions" => self.read_divisions(reader, key)?,
            "expandable_segments" => self.expandable_segments = reader.truth(key)?,
            "expandable_segments_reserve" => {
                self.range_reserve = RangeReserve::read(reader.value(key)?).or(self.range_reserve);
            }
            "throw_on_cudamalloc_oom" => self.throw_on_oom = reader.truth(key)?,
            "backend" => match reader.value(key)? {
                "native" => {}
                "cudaMallocAsync" => return Err(AllocatorSettingsError::OtherBackend),
                other => return Err(bad(key, other, "native or cudaMallocAsync")),
            },
            // The remaining settings concern page-locked host memory, the lock around driver calls
            // and the graph of a stream capture. None of them changes where device memory lies.
            "pinned_num_register_threads" => {
                reader.integer(key, "a power of two up to 128", |n| n.is_power_of_two() && n <= 128)?;
                self.ignored.push(key);
            }
            "pinned_reserve_segment_size_mb" => {
                reader.integer(key, "a whole number above 0", |n| n > 0)?;
                self.ignored.push(key);
            }
            "pinned_max_cached_size_mb" | "pinned_max_round_threshold_mb" => {
                reader.integer(key, "a whole number", |_| true)?;
                self.ignored.push(key);
            }
            // It concerns only streams that a program puts in a class by a C++ call.
            "expandable_segments_reserve_by_class" => {
                reader.skip_list(key)?;
                self.ignored.push(key);
            }
            _ => {
                reader.truth(key)?;
                self.ignored.push(key);
            }
        }
        Ok(())
    }

    /// One divisor for all sizes, or a list of `MEBIBYTES:DIVISOR`. The first entry also holds for
    /// smaller sizes, `>` for sizes above the last key
    /// (`AcceleratorAllocatorConfig::parseRoundUpPower2Divisions`).
    fn read_divisions(&mut self, reader: &mut TokenReader<'_>, key: &'static str) -> Parsed<()> {
        let rules = self.release.rules();
        let divisions = &mut self.roundup_power2_divisions;
        let value = reader.value(key)?;
        if value != "[" {
            divisions.fill(reader.integer_in(key, value, "a power of two", u64::is_power_of_two)?);
            return Ok(());
        }
        let (mut first, mut last) = (true, 0);
        loop {
            reader.place += 1;
            let boundary = match reader.token() {
                Some("]") => return Ok(()),
                // Up to 2.9, a list may end with the text.
                None if reader.strict => return Ok(()),
                other => other.ok_or(AllocatorSettingsError::OpenList { key })?,
            };
            let divisor = match rules.accepts_no_divisions {
                true => reader.integer(key, "0 or a power of two", |n| n == 0 || n.is_power_of_two())?,
                false => reader.integer(key, "a power of two", u64::is_power_of_two)?,
            };
            if boundary == ">" {
                let above = last + usize::from(!rules.above_includes_last);
                divisions[above.min(ROUNDUP_INTERVALS)..].fill(divisor);
            } else {
                let mebibytes = leading_integer(boundary).filter(|mebibytes| mebibytes.is_power_of_two());
                let mebibytes = mebibytes.ok_or_else(|| bad(key, boundary, "a power of two"))?;
                last = (mebibytes.ilog2() as usize).min(ROUNDUP_INTERVALS - 1);
                if std::mem::take(&mut first) {
                    divisions[..last].fill(divisor);
                }
                divisions[last] = divisor;
            }
            if reader.tokens.get(reader.place + 1).ok_or(AllocatorSettingsError::OpenList { key })? != "]" {
                reader.separator(",")?;
            }
        }
    }
}

/// The position of the parser in the tokens.
struct TokenReader<'a> {
    tokens: &'a [String],
    place: usize,
    /// Separators are checked, and whole numbers have 32 bits.
    strict: bool,
}

impl<'a> TokenReader<'a> {
    fn token(&self) -> Option<&'a str> {
        self.tokens.get(self.place).map(String::as_str)
    }

    /// Skips a separator. PyTorch checks which one it is up to 2.9.
    fn separator(&mut self, expected: &'static str) -> Parsed<()> {
        self.place += 1;
        match self.token() {
            Some(found) if self.strict && found != expected => {
                Err(AllocatorSettingsError::Separator { expected, found: found.to_owned() })
            }
            _ => Ok(()),
        }
    }

    /// Goes on to the next setting.
    fn end_setting(&mut self) -> Parsed<()> {
        self.separator(",")?;
        self.place += 1;
        Ok(())
    }

    /// Skips the separator and returns the value.
    fn value(&mut self, key: &'static str) -> Parsed<&'a str> {
        self.separator(":")?;
        self.place += 1;
        self.token().ok_or(AllocatorSettingsError::MissingValue { key })
    }

    /// Skips a list of names and values.
    fn skip_list(&mut self, key: &'static str) -> Parsed<()> {
        match self.value(key)? {
            "[" => {}
            other => return Err(bad(key, other, "a list [NAME:SHARE,...]")),
        }
        while self.token() != Some("]") {
            self.place += 1;
            self.token().ok_or(AllocatorSettingsError::OpenList { key })?;
        }
        Ok(())
    }

    fn truth(&mut self, key: &'static str) -> Parsed<bool> {
        match self.value(key)? {
            "True" => Ok(true),
            "False" => Ok(false),
            other => Err(bad(key, other, "True or False")),
        }
    }

    fn number(&mut self, key: &'static str, expected: &str, accepted: impl Fn(f64) -> bool) -> Parsed<f64> {
        let value = self.value(key)?;
        leading_number(value).filter(|&x| accepted(x)).ok_or_else(|| bad(key, value, expected))
    }

    fn integer(&mut self, key: &'static str, expected: &str, accepted: impl Fn(u64) -> bool) -> Parsed<u64> {
        let value = self.value(key)?;
        self.integer_in(key, value, expected, accepted)
    }

    fn integer_in(
        &self,
        key: &'static str,
        value: &str,
        expected: &str,
        accepted: impl Fn(u64) -> bool,
    ) -> Parsed<u64> {
        let fits = |n: &u64| !self.strict || i32::try_from(n.cast_signed()).is_ok();
        let number = leading_integer(value).filter(fits);
        number.filter(|&n| accepted(n)).ok_or_else(|| bad(key, value, expected))
    }

    fn mebibytes_from(&mut self, key: &'static str, (least, origin): (u64, &str)) -> Parsed<u64> {
        let expected = format!("a whole number of at least {least}{origin}");
        self.integer(key, &expected, |mebibytes| mebibytes >= least).map(to_bytes)
    }
}

fn bad(key: &'static str, value: &str, expected: &str) -> AllocatorSettingsError {
    AllocatorSettingsError::BadValue { key, value: value.to_owned(), expected: expected.to_owned() }
}

fn to_bytes(mebibytes: u64) -> u64 {
    mebibytes.min(u64::MAX / MIB) * MIB
}

/// Splits at `,` `:` `[` `]`, which are tokens themselves. White space is dropped.
fn tokens(text: &str) -> Vec<String> {
    let mut tokens = vec![String::new()];
    for character in text.chars().filter(|character| !character.is_whitespace()) {
        if matches!(character, ',' | ':' | '[' | ']') {
            tokens.push(character.to_string());
            tokens.push(String::new());
        } else if let Some(word) = tokens.last_mut() {
            word.push(character);
        }
    }
    tokens.retain(|token| !token.is_empty());
    tokens
}

/// The number at the start of a text, as C's `strtoull` reads it: the rest is ignored, and a minus
/// sign wraps around.
fn leading_integer(text: &str) -> Option<u64> {
    let (negative, digits) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    let value: u64 = digits[..end].parse().ok()?;
    Some(if negative { value.wrapping_neg() } else { value })
}

fn leading_number(text: &str) -> Option<f64> {
    let end = text.find(|c: char| !matches!(c, '0'..='9' | '+' | '-' | '.' | 'e' | 'E')).unwrap_or(text.len());
    (1..=end).rev().find_map(|end| text[..end].parse().ok())
}

/// The release that began to read [`NEW_CONF_VARIABLE`].
const FIRST_WITH_NEW_NAME: Release = Release::new(10);

/// Whether a program of one of these releases reads the new name, if that is the same for all of them.
fn reads_new_name(release: Option<ReleaseSpan>) -> Option<bool> {
    let span = release?;
    if span.first >= FIRST_WITH_NEW_NAME {
        return Some(true);
    }
    (span.last < FIRST_WITH_NEW_NAME).then_some(false)
}

/// The shell line that sets the allocator's settings. Without a known release it has the name that every release reads.
///
/// ```
/// use oomph_pytorch::{Release, ReleaseSpan, export_line};
/// let settings = "expandable_segments:True";
/// assert_eq!(export_line(settings, None), "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True");
/// let new = export_line(settings, Some(ReleaseSpan::only(Release::new(10))));
/// assert_eq!(new, "export PYTORCH_ALLOC_CONF=expandable_segments:True");
/// ```
#[must_use]
pub fn export_line(settings: &str, release: Option<ReleaseSpan>) -> String {
    let name = if reads_new_name(release) == Some(true) { NEW_CONF_VARIABLE } else { CONF_VARIABLE };
    // A list such as [256:1,>:8] has signs that a shell interprets.
    let quote = if settings.contains(['[', '>', ']']) { "'" } else { "" };
    format!("export {name}={quote}{settings}{quote}")
}

/// Which name is for which release; beside [`export_line`].
#[must_use]
pub fn variable_note(release: Option<ReleaseSpan>) -> &'static str {
    match reads_new_name(release) {
        Some(true) => {
            "PYTORCH_ALLOC_CONF is for PyTorch 2.10 and later, as recorded. The deprecated PYTORCH_CUDA_ALLOC_CONF wins if \
             both are set: unset it"
        }
        Some(false) => {
            "PYTORCH_CUDA_ALLOC_CONF is for PyTorch up to 2.9, as recorded. From 2.10 on it is PYTORCH_ALLOC_CONF"
        }
        None => {
            "every PyTorch reads PYTORCH_CUDA_ALLOC_CONF. From 2.10 on that name is deprecated, and PYTORCH_ALLOC_CONF is \
             the new one"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<AllocatorSettings, AllocatorSettingsError> {
        AllocatorSettings::default().updated(text)
    }

    #[test]
    fn every_setting_is_read() {
        let settings = read(
            "max_split_size_mb:64, max_non_split_rounding_mb:32, garbage_collection_threshold:0.6, \
             expandable_segments:True, large_segment_size_mb:24, per_process_memory_fraction:0.5, backend:native",
        );
        let expected = AllocatorSettings {
            release: Release::DEFAULT,
            max_split_size: 64 * MIB,
            max_non_split_rounding: 32 * MIB,
            garbage_collection_threshold: 0.6,
            roundup_power2_divisions: [0; 16],
            expandable_segments: true,
            large_segment_size: 24 * MIB,
            per_process_memory_fraction: 0.5,
            throw_on_oom: false,
            range_reserve: None,
            ignored: Vec::new(),
        };
        assert_eq!(settings, Ok(expected));
    }

    #[test]
    fn gaps_in_a_list_of_divisions_are_zero() {
        let divisions = |text| read(text).unwrap().roundup_power2_divisions;
        assert_eq!(
            divisions("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]"),
            [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8]
        );
        assert_eq!(
            divisions("roundup_power2_divisions:[64:8,256:4,1024:4,>:1]"),
            [8, 8, 8, 8, 8, 8, 8, 0, 4, 0, 4, 1, 1, 1, 1, 1]
        );
        assert_eq!(divisions("roundup_power2_divisions:4"), [4; 16]);
        assert_eq!(divisions("roundup_power2_divisions:[65536:2,>:4]")[15], 2);
    }

    #[test]
    fn reading_again_resets_what_pytorch_resets() {
        let first = read(
            "max_split_size_mb:64,garbage_collection_threshold:0.6,expandable_segments:True,large_segment_size_mb:32,\
             roundup_power2_divisions:4,max_non_split_rounding_mb:64",
        );
        let again = first.unwrap().updated("").unwrap();
        let expected = AllocatorSettings {
            expandable_segments: true,
            large_segment_size: 32 * MIB,
            max_non_split_rounding: 32 * MIB,
            ..AllocatorSettings::default()
        };
        assert_eq!(again, expected);
    }

    #[test]
    fn texts_that_pytorch_accepts_by_accident() {
        for text in [
            "max_split_size_mb:40abc",
            "max_split_size_mb,40",
            "max_split_size_mb:40:",
            "max_split_size_mb:-1",
            "max_split_size_mb:+40",
            "expandable_segments:True:max_split_size_mb:40",
            "expandable_segments:True,",
            "roundup_power2_divisions:[]",
            "roundup_power2_divisions:[>:2]",
            "garbage_collection_threshold:0.5x",
            "max_ split_size_mb : 40",
            "",
        ] {
            assert!(read(text).is_ok(), "{text}: {:?}", read(text));
        }
    }

    #[test]
    fn a_wrong_setting_is_named() {
        for (text, message) in [
            ("max_split_size_mb=40", "unknown setting 'max_split_size_mb=40'; did you mean 'max_split_size_mb'?"),
            ("expandable_segment:True", "unknown setting 'expandable_segment'; did you mean 'expandable_segments'?"),
            (",", "unknown setting ','"),
            (
                "max_split_size_mb:19",
                "setting 'max_split_size_mb': '19' is not a whole number of at least 20 (large_segment_size_mb)",
            ),
            ("expandable_segments:true", "setting 'expandable_segments': 'true' is not True or False"),
            ("expandable_segments", "setting 'expandable_segments' has no value; write expandable_segments:VALUE"),
            ("roundup_power2_divisions:3", "setting 'roundup_power2_divisions': '3' is not a power of two"),
            ("roundup_power2_divisions:[1:2,", "the list of 'roundup_power2_divisions' is not closed by ']'"),
            ("large_segment_size_mb:10", "setting 'large_segment_size_mb': '10' is not a whole number above 10"),
            (
                "garbage_collection_threshold:1",
                "setting 'garbage_collection_threshold': '1' is not a number between 0 and 1, both excluded",
            ),
            (
                "backend:cudaMallocAsync",
                "backend:cudaMallocAsync is another allocator: use the strategy 'async' for it",
            ),
        ] {
            assert_eq!(read(text).unwrap_err().to_string(), message);
        }
    }

    #[test]
    fn first_release_of_a_setting_is_known() {
        for (key, value, since) in [
            ("expandable_segments", "True", 1),
            ("release_lock_on_cudamalloc", "True", 2),
            ("pinned_use_background_threads", "True", 6),
            ("max_non_split_rounding_mb", "40", 6),
            ("graph_capture_record_stream_reuse", "True", 9),
            ("per_process_memory_fraction", "0.5", 10),
            ("large_segment_size_mb", "32", 11),
            ("throw_on_cudamalloc_oom", "True", 12),
            ("pinned_max_cached_size_mb", "40", 13),
            ("expandable_segments_reserve", "0.5", 15),
            ("expandable_segments_reserve_by_class", "[a:0.5,b:2G]", 15),
        ] {
            let text = format!("{key}:{value}");
            let of_release = |minor| AllocatorSettings::of_release(Release::new(minor)).updated(&text);
            assert!(of_release(since).is_ok(), "{text}: {:?}", of_release(since));
            let message = of_release(since - 1).unwrap_err().to_string();
            assert_eq!(message, format!("PyTorch 2.{} has no setting '{key}': it exists since 2.{since}", since - 1));
        }
    }

    #[test]
    fn releases_read_the_same_text_in_their_own_way() {
        let read = |minor, text| AllocatorSettings::of_release(Release::new(minor)).updated(text);
        let list = "roundup_power2_divisions:[1:2,4:4,>:8]";
        assert_eq!(read(9, list).unwrap().roundup_power2_divisions[..4], [2, 0, 8, 8]);
        assert_eq!(read(10, list).unwrap().roundup_power2_divisions[..4], [2, 0, 4, 8]);
        assert!(
            read(3, "roundup_power2_divisions:[1:0]").is_err() && read(4, "roundup_power2_divisions:[1:0]").is_ok()
        );
        assert!(read(9, "max_split_size_mb:20").is_err() && read(10, "max_split_size_mb:20").is_ok());
        // Separators are checked up to 2.9, and whole numbers have 32 bits.
        let wrong = read(9, "max_split_size_mb,40").unwrap_err().to_string();
        assert_eq!(wrong, "',' where the settings need ':'");
        assert!(read(10, "max_split_size_mb,40").is_ok());
        assert!(read(9, "max_split_size_mb:4294967296").is_err() && read(10, "max_split_size_mb:4294967296").is_ok());
        let kept = read(10, "max_non_split_rounding_mb:64").unwrap().updated("").unwrap();
        let reset = read(11, "max_non_split_rounding_mb:64").unwrap().updated("").unwrap();
        assert_eq!((kept.max_non_split_rounding, reset.max_non_split_rounding), (64 * MIB, LARGE_BUFFER));
    }

    #[test]
    fn sizes_of_address_ranges_are_shares_or_gibibytes() {
        let read = |value: &str| {
            let text = format!("expandable_segments_reserve:{value}");
            AllocatorSettings::of_release(Release::new(15)).updated(&text).unwrap().range_reserve
        };
        assert_eq!(read("0.5").map(|reserve| reserve.bytes(80 * GIB)), Some(40 * GIB));
        assert_eq!(read("2G").map(|reserve| reserve.bytes(80 * GIB)), Some(2 * GIB));
        assert_eq!(read("1e20G").map(|reserve| reserve.bytes(80 * GIB)), Some(u64::MAX));
        // PyTorch warns and goes on.
        assert!(["x", "0", "-1", "12X"].into_iter().all(|value| read(value).is_none()));
    }

    #[test]
    fn settings_without_effect_are_listed() {
        let settings = read("pinned_use_background_threads:True,release_lock_on_cudamalloc:True").unwrap();
        assert_eq!(settings.ignored, ["pinned_use_background_threads", "release_lock_on_cudamalloc"]);
    }

    #[test]
    fn lists_are_quoted() {
        let settings = "roundup_power2_divisions:[256:1,>:8]";
        assert_eq!(export_line(settings, None), format!("export PYTORCH_CUDA_ALLOC_CONF='{settings}'"));
    }

    #[test]
    fn note_names_the_variable_of_the_line_and_the_other_one() {
        let spans = [(9, 9), (10, 11), (8, 12)];
        let spans = spans.map(|(first, last)| ReleaseSpan { first: Release::new(first), last: Release::new(last) });
        for release in [None].into_iter().chain(spans.map(Some)) {
            let (line, note) = (export_line("a:1", release), variable_note(release));
            let name = line.trim_start_matches("export ").trim_end_matches("=a:1");
            assert!(note.contains(name) && note.contains("2.10"), "{line}: {note}");
            assert!(note.contains(CONF_VARIABLE) && note.contains(NEW_CONF_VARIABLE), "{note}");
        }
    }
}
