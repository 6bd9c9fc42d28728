//! The syntax of `PYTORCH_CUDA_ALLOC_CONF`, as PyTorch 2.11 reads it.
//!
//! Texts that PyTorch accepts by accident (a wrong separator, `40abc` for 40) are accepted here too, and what it
//! refuses is refused, in words that name the setting. Reading a text again resets some settings and keeps others.

use super::QUANTUM;
use oomph_base::{MIB, did_you_mean, nearest};

/// No limit: PyTorch's default for the largest block that may be split.
pub(super) const UNLIMITED: u64 = u64::MAX;
/// Sizes are rounded by one of so many divisions: one for each power of two from 1 MiB to 32 GiB.
const INTERVALS: usize = 16;
/// Requests from here on get a segment of their own; the common segments must be larger.
const OWN_SEGMENT_MIB: u64 = 10;

/// Every setting that has an effect here.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Blocks of at least this size are neither split nor given to smaller requests.
    pub max_split_size: u64,
    /// How much larger such a block may be than the request it serves.
    pub max_non_split_rounding: u64,
    /// Share of the limit above which old cached blocks are given back; 0 is off.
    pub garbage_collection_threshold: f64,
    /// Into how many steps each power of two is divided for rounding, from 1 MiB up; 0 is off.
    pub roundup_power2_divisions: [u64; INTERVALS],
    /// Whether new memory is mapped into growing ranges.
    pub expandable_segments: bool,
    /// Size of segments for requests between 1 and 10 MiB, and of the pieces that large ranges grow by.
    pub large_segment_size: u64,
    /// Share of the device that may be used; looked at only when the allocator is made.
    pub per_process_memory_fraction: f64,
    /// Settings that were understood and change nothing here, with the reason.
    pub ignored: Vec<Ignored>,
}

/// A setting that PyTorch knows and that changes nothing in this model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("setting '{key}' has no effect here: {reason}")]
pub struct Ignored {
    /// Which.
    pub key: &'static str,
    /// Why.
    pub reason: &'static str,
}

/// A text that is not a list of settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// No setting of that name.
    #[error("unknown setting '{key}'{}", did_you_mean(suggestion.as_deref()))]
    UnknownKey {
        /// What was written.
        key: String,
        /// The nearest right name.
        suggestion: Option<String>,
    },
    /// The text ends where a value should be.
    #[error("setting '{key}' has no value; write {key}:VALUE")]
    MissingValue {
        /// Which setting.
        key: &'static str,
    },
    /// A list without an end.
    #[error("the list of '{key}' is not closed by ']'")]
    OpenList {
        /// Which setting.
        key: &'static str,
    },
    /// A value that the setting does not take.
    #[error("setting '{key}': '{value}' is not {expected}")]
    BadValue {
        /// Which setting.
        key: &'static str,
        /// What was written.
        value: String,
        /// What is taken.
        expected: String,
    },
    /// The other backend.
    #[error("backend:cudaMallocAsync is another allocator: use the strategy 'async' for it")]
    OtherBackend,
}

const HOST_ONLY: &str = "it concerns page-locked host memory";
const NO_LOCK: &str = "there is no lock around driver calls to release";
const NO_CAPTURE: &str = "stream capture is modelled without its graph";

const KEYS: &[&str] = &[
    "backend",
    "expandable_segments",
    "garbage_collection_threshold",
    "graph_capture_record_stream_reuse",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "roundup_power2_divisions",
];

impl Default for Settings {
    fn default() -> Self {
        Settings {
            max_split_size: UNLIMITED,
            max_non_split_rounding: 20 * MIB,
            garbage_collection_threshold: 0.0,
            roundup_power2_divisions: [0; INTERVALS],
            expandable_segments: false,
            large_segment_size: 20 * MIB,
            per_process_memory_fraction: 1.0,
            ignored: Vec::new(),
        }
    }
}

impl Settings {
    /// These settings after `text` has been read: what the text does not name is reset or kept as PyTorch does it.
    ///
    /// ```
    /// use oomph_alloc::strategy::caching::Settings;
    /// let settings = Settings::default().updated("expandable_segments:True,max_split_size_mb:128")?;
    /// let again = settings.updated("garbage_collection_threshold:0.8")?;
    /// assert!(again.expandable_segments && again.max_split_size == u64::MAX);
    /// # Ok::<(), oomph_alloc::strategy::caching::SettingsError>(())
    /// ```
    pub fn updated(&self, text: &str) -> Result<Settings, SettingsError> {
        let tokens = tokens(text);
        let mut settings = Settings {
            max_split_size: UNLIMITED,
            roundup_power2_divisions: [0; INTERVALS],
            garbage_collection_threshold: 0.0,
            ignored: Vec::new(),
            ..self.clone()
        };
        // The bounds of other settings depend on this one, wherever it stands.
        for place in 0..tokens.len() {
            if tokens[place] == "large_segment_size_mb" {
                settings.read_large_segment_size(&mut Reader { tokens: &tokens, place })?;
            }
        }
        settings.max_non_split_rounding = settings.large_segment_size;
        let mut reader = Reader { tokens: &tokens, place: 0 };
        while reader.place < tokens.len() {
            settings.read_one(&mut reader)?;
            // The separator, whatever it is, and on to the next name.
            reader.place += 2;
        }
        Ok(settings)
    }

    /// The size of the block that a request needs.
    #[inline]
    pub fn round(&self, bytes: u64) -> u64 {
        if bytes < QUANTUM {
            return QUANTUM;
        }
        let power = bytes.ilog2();
        let divisions = self.roundup_power2_divisions[power.saturating_sub(20).min(INTERVALS as u32 - 1) as usize];
        let step = if divisions > 1 && bytes > QUANTUM.saturating_mul(divisions) {
            (1 << power) >> divisions.ilog2()
        } else {
            QUANTUM
        };
        // Both steps are powers of two, and sizes end far below the largest number.
        (bytes + step - 1) & !(step - 1)
    }

    fn read_one(&mut self, reader: &mut Reader<'_>) -> Result<(), SettingsError> {
        let written = reader.tokens[reader.place].as_str();
        let Some(&key) = KEYS.iter().find(|&&key| key == written) else {
            let name = written.split('=').next().unwrap_or(written);
            return Err(SettingsError::UnknownKey {
                key: written.to_owned(),
                suggestion: nearest(name, KEYS.iter().copied()),
            });
        };
        match key {
            "max_split_size_mb" => self.max_split_size = reader.at_least_a_segment(key, self.large_segment_size)?,
            "max_non_split_rounding_mb" => {
                self.max_non_split_rounding = reader.at_least_a_segment(key, self.large_segment_size)?;
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
            "large_segment_size_mb" => self.read_large_segment_size(reader)?,
            "backend" => match reader.value(key)? {
                "native" => {}
                "cudaMallocAsync" => return Err(SettingsError::OtherBackend),
                other => return Err(bad(key, other, "native or cudaMallocAsync")),
            },
            "pinned_num_register_threads" => {
                let value = reader.value(key)?;
                if !leading_integer(value).is_some_and(|n| n.is_power_of_two() && n <= 128) {
                    return Err(bad(key, value, "a power of two up to 128"));
                }
                self.ignore(key, HOST_ONLY);
            }
            "pinned_reserve_segment_size_mb" => {
                let value = reader.value(key)?;
                if leading_integer(value).is_none_or(|n| n == 0) {
                    return Err(bad(key, value, "a whole number above 0"));
                }
                self.ignore(key, HOST_ONLY);
            }
            "release_lock_on_cudamalloc" | "release_lock_on_hipmalloc" => {
                reader.truth(key)?;
                self.ignore(key, NO_LOCK);
            }
            "graph_capture_record_stream_reuse" => {
                reader.truth(key)?;
                self.ignore(key, NO_CAPTURE);
            }
            _ => {
                reader.truth(key)?;
                self.ignore(key, HOST_ONLY);
            }
        }
        Ok(())
    }

    fn ignore(&mut self, key: &'static str, reason: &'static str) {
        self.ignored.push(Ignored { key, reason });
    }

    fn read_large_segment_size(&mut self, reader: &mut Reader<'_>) -> Result<(), SettingsError> {
        let key = "large_segment_size_mb";
        let value = reader.value(key)?;
        match leading_integer(value) {
            Some(mebibytes) if mebibytes > OWN_SEGMENT_MIB => self.large_segment_size = to_bytes(mebibytes),
            _ => return Err(bad(key, value, "a whole number above 10")),
        }
        Ok(())
    }

    /// One divisor for all sizes, or a list of `MEBIBYTES:DIVISOR`: the first also holds below, `>` above the last.
    fn read_divisions(&mut self, reader: &mut Reader<'_>, key: &'static str) -> Result<(), SettingsError> {
        let divisions = &mut self.roundup_power2_divisions;
        let value = reader.value(key)?;
        if value != "[" {
            let divisor = leading_integer(value).filter(|n| n.is_power_of_two());
            divisions.fill(divisor.ok_or_else(|| bad(key, value, "a power of two"))?);
            return Ok(());
        }
        let (mut first, mut last) = (true, 0);
        loop {
            reader.place += 1;
            let boundary = reader.token().ok_or(SettingsError::OpenList { key })?;
            if boundary == "]" {
                return Ok(());
            }
            let value = reader.value(key)?;
            let divisor = leading_integer(value).filter(|&n| n == 0 || n.is_power_of_two());
            let divisor = divisor.ok_or_else(|| bad(key, value, "0 or a power of two"))?;
            if boundary == ">" {
                divisions[(last + 1).min(INTERVALS)..].fill(divisor);
            } else {
                let mebibytes = leading_integer(boundary).filter(|n| n.is_power_of_two());
                let mebibytes = mebibytes.ok_or_else(|| bad(key, boundary, "a power of two"))?;
                last = (mebibytes.ilog2() as usize).min(INTERVALS - 1);
                if std::mem::take(&mut first) {
                    divisions[..last].fill(divisor);
                }
                divisions[last] = divisor;
            }
            if reader.tokens.get(reader.place + 1).ok_or(SettingsError::OpenList { key })? != "]" {
                reader.place += 1;
            }
        }
    }
}

/// Where the parser stands.
struct Reader<'a> {
    tokens: &'a [String],
    place: usize,
}

impl<'a> Reader<'a> {
    fn token(&self) -> Option<&'a str> {
        self.tokens.get(self.place).map(String::as_str)
    }

    /// Steps over the separator, whatever it is, to the value.
    fn value(&mut self, key: &'static str) -> Result<&'a str, SettingsError> {
        self.place += 2;
        self.token().ok_or(SettingsError::MissingValue { key })
    }

    fn truth(&mut self, key: &'static str) -> Result<bool, SettingsError> {
        match self.value(key)? {
            "True" => Ok(true),
            "False" => Ok(false),
            other => Err(bad(key, other, "True or False")),
        }
    }

    fn number(
        &mut self,
        key: &'static str,
        expected: &str,
        accepted: impl Fn(f64) -> bool,
    ) -> Result<f64, SettingsError> {
        let value = self.value(key)?;
        leading_number(value).filter(|&x| accepted(x)).ok_or_else(|| bad(key, value, expected))
    }

    fn at_least_a_segment(&mut self, key: &'static str, segment: u64) -> Result<u64, SettingsError> {
        let value = self.value(key)?;
        let mebibytes = leading_integer(value).filter(|&n| n >= segment / MIB);
        let expected = || format!("a whole number of at least {} (large_segment_size_mb)", segment / MIB);
        mebibytes.map(to_bytes).ok_or_else(|| bad(key, value, &expected()))
    }
}

fn bad(key: &'static str, value: &str, expected: &str) -> SettingsError {
    SettingsError::BadValue { key, value: value.to_owned(), expected: expected.to_owned() }
}

fn to_bytes(mebibytes: u64) -> u64 {
    mebibytes.min(u64::MAX / MIB) * MIB
}

/// Splits at `,` `:` `[` `]`, which are tokens themselves; white space counts nowhere.
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

/// The number at the start of a text, as C reads it: what follows is not looked at, and a minus wraps around.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Settings, SettingsError> {
        Settings::default().updated(text)
    }

    #[test]
    fn every_setting_is_read() {
        let settings = read(
            "max_split_size_mb:64, max_non_split_rounding_mb:32, garbage_collection_threshold:0.6, \
             expandable_segments:True, large_segment_size_mb:24, per_process_memory_fraction:0.5, backend:native",
        );
        let expected = Settings {
            max_split_size: 64 * MIB,
            max_non_split_rounding: 32 * MIB,
            garbage_collection_threshold: 0.6,
            roundup_power2_divisions: [0; 16],
            expandable_segments: true,
            large_segment_size: 24 * MIB,
            per_process_memory_fraction: 0.5,
            ignored: Vec::new(),
        };
        assert_eq!(settings, Ok(expected));
    }

    #[test]
    fn a_list_of_divisions_leaves_its_gaps_at_zero() {
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
    fn sizes_are_rounded_by_division_of_powers_of_two() {
        let settings = read("roundup_power2_divisions:4").unwrap();
        for (bytes, rounded) in [
            (1, 512),
            (1200, 1536),
            (2049, 2560),
            (5000, 5120),
            (3 * MIB, 3 * MIB),
            (3 * MIB + 1, 7 * MIB / 2),
            (21 * MIB, 24 * MIB),
            (84 * MIB, 96 * MIB),
            (100 * MIB, 112 * MIB),
            (64 * MIB, 64 * MIB),
        ] {
            assert_eq!(settings.round(bytes), rounded, "{bytes}");
        }
        assert_eq!(Settings::default().round(100 * MIB + 1), 100 * MIB + 512);
    }

    #[test]
    fn reading_again_resets_what_pytorch_resets() {
        let first = read(
            "max_split_size_mb:64,garbage_collection_threshold:0.6,expandable_segments:True,large_segment_size_mb:32,\
             roundup_power2_divisions:4,max_non_split_rounding_mb:64",
        );
        let again = first.unwrap().updated("").unwrap();
        let expected = Settings {
            expandable_segments: true,
            large_segment_size: 32 * MIB,
            max_non_split_rounding: 32 * MIB,
            ..Settings::default()
        };
        assert_eq!(again, expected);
    }

    #[test]
    fn what_pytorch_lets_pass_passes() {
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
    fn host_settings_are_accepted_and_reported() {
        let settings = read("pinned_use_background_threads:True,release_lock_on_cudamalloc:True").unwrap();
        assert_eq!(settings.ignored.len(), 2);
        let shown = settings.ignored[0].to_string();
        assert_eq!(
            shown,
            "setting 'pinned_use_background_threads' has no effect here: it concerns page-locked host memory"
        );
    }
}
