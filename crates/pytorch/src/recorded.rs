//! The settings that a memory snapshot names (`allocator_settings`, written by
//! `_cuda_memorySnapshot` in `torch/csrc/cuda/Module.cpp`).

use std::sync::Arc;

use oomph_base::Layout;

use crate::{AllocatorSettings, AllocatorSettingsError, CONF_VARIABLE, ROUNDUP_INTERVALS, Release, UNLIMITED};

/// The memory that PyTorch's allocator held before the first event of a recording. A strategy can
/// continue from it.
#[derive(Clone, Debug)]
pub struct InitialLayout {
    /// The segments and blocks.
    pub layout: Layout,
    /// The settings that produced this layout.
    pub settings: AllocatorSettings,
    /// The limit of the allocator that produced it, in bytes, if it is known.
    pub limit: Option<u64>,
}

/// The allocator settings in a snapshot, with the names and in the order of the file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecordedSettings {
    /// Name and value.
    pub values: Vec<(Arc<str>, RecordedValue)>,
}

/// The value of a setting in a snapshot.
#[derive(Clone, Debug, PartialEq)]
pub enum RecordedValue {
    /// Yes or no.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A fraction.
    Float(f64),
    /// A text.
    Text(Arc<str>),
    /// A table of numbers, such as `roundup_power2_divisions`.
    Table(Vec<(Arc<str>, i64)>),
}

impl RecordedSettings {
    /// What PyTorch writes for these settings, which were given as `conf`.
    #[must_use]
    pub fn of(settings: &AllocatorSettings, conf: &str) -> RecordedSettings {
        use RecordedValue::{Bool, Float, Int, Table, Text};
        let divisions = (0..).zip(settings.roundup_power2_divisions);
        let divisions = divisions.map(|(power, parts)| ((1_u64 << power).to_string().into(), parts as i64)).collect();
        let always = Release::OLDEST;
        let values = [
            (always, CONF_VARIABLE, Text(conf.into())),
            // PyTorch writes -1 for no limit.
            (always, "max_split_size", Int(i64::try_from(settings.max_split_size).unwrap_or(-1))),
            (always, "garbage_collection_threshold", Float(settings.garbage_collection_threshold)),
            (always, "expandable_segments", Bool(settings.expandable_segments)),
            (always, "pinned_num_register_threads", Int(1)),
            (always, "release_lock_on_cudamalloc", Bool(false)),
            (always, "pinned_use_cuda_host_register", Bool(false)),
            (Release::new(9), "graph_capture_record_stream_reuse", Bool(false)),
            (Release::new(13), "max_round_threshold", Int(-1)),
            (Release::new(13), "max_cached_size", Int(-1)),
            (always, "roundup_power2_divisions", Table(divisions)),
        ];
        let written = values.into_iter().filter(|(since, ..)| *since <= settings.release);
        RecordedSettings { values: written.map(|(_, name, value)| (name.into(), value)).collect() }
    }

    /// Settings of which only the text is known.
    #[must_use]
    pub fn of_text(conf: &str) -> RecordedSettings {
        RecordedSettings { values: vec![(CONF_VARIABLE.into(), RecordedValue::Text(conf.into()))] }
    }

    /// The value of a setting.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&RecordedValue> {
        self.values.iter().find(|(known, _)| &**known == name).map(|(_, value)| value)
    }

    /// The allocator that replaced PyTorch's, if the file names one: `liboomph.so` writes `oomph:` and its strategy.
    #[must_use]
    pub fn other_allocator(&self) -> Option<&str> {
        match self.get("allocator") {
            Some(RecordedValue::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// The text that the program configured its allocator with.
    #[must_use]
    pub fn conf(&self) -> &str {
        match self.get(CONF_VARIABLE) {
            Some(RecordedValue::Text(text)) => text,
            _ => "",
        }
    }

    /// The same text without white space, which PyTorch ignores.
    #[must_use]
    pub fn compact_conf(&self) -> String {
        self.conf().split_whitespace().collect()
    }

    /// The settings at the end of a recording of this release. The text names all of them; the values
    /// beside it are those in force at the end, so they take precedence.
    pub fn in_force(&self, release: Release) -> Result<AllocatorSettings, AllocatorSettingsError> {
        AllocatorSettings::of_release(release).updated(self.conf()).map(|settings| self.applied_to(settings))
    }

    /// `settings` with the values that stand beside the text.
    #[must_use]
    pub fn applied_to(&self, mut settings: AllocatorSettings) -> AllocatorSettings {
        if let Some(&RecordedValue::Bool(expandable)) = self.get("expandable_segments") {
            settings.expandable_segments = expandable;
        }
        if let Some(&RecordedValue::Float(threshold)) = self.get("garbage_collection_threshold") {
            settings.garbage_collection_threshold = threshold;
        }
        if let Some(&RecordedValue::Int(bytes)) = self.get("max_split_size") {
            settings.max_split_size = u64::try_from(bytes).unwrap_or(UNLIMITED);
        }
        match self.get("roundup_power2_divisions") {
            Some(RecordedValue::Table(table)) => settings.roundup_power2_divisions = divisions(table),
            Some(_) => settings.roundup_power2_divisions = [0; ROUNDUP_INTERVALS],
            None => {}
        }
        settings
    }
}

/// The table of divisions, whose keys are powers of two in mebibytes.
fn divisions(table: &[(Arc<str>, i64)]) -> [u64; ROUNDUP_INTERVALS] {
    let mut divisions = [0; ROUNDUP_INTERVALS];
    for (mebibytes, parts) in table {
        let power = mebibytes.parse::<u64>().ok().and_then(u64::checked_ilog2);
        if let Some(division) = power.and_then(|power| divisions.get_mut(power as usize)) {
            *division = u64::try_from(*parts).unwrap_or(0);
        }
    }
    divisions
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(values: Vec<(&str, RecordedValue)>) -> RecordedSettings {
        RecordedSettings { values: values.into_iter().map(|(name, value)| (name.into(), value)).collect() }
    }

    #[test]
    fn another_allocator_is_named() {
        let named = recorded(vec![("allocator", RecordedValue::Text("oomph:oomph".into()))]);
        assert_eq!(named.other_allocator(), Some("oomph:oomph"));
        assert_eq!(RecordedSettings::of_text("max_split_size_mb:64").other_allocator(), None);
    }

    #[test]
    fn values_take_precedence_over_the_text() {
        let text = RecordedValue::Text("max_split_size_mb:64,large_segment_size_mb:30".into());
        let values = vec![
            (CONF_VARIABLE, text),
            ("expandable_segments", RecordedValue::Bool(true)),
            ("max_split_size", RecordedValue::Int(-1)),
            ("garbage_collection_threshold", RecordedValue::Float(0.5)),
        ];
        let settings = recorded(values).in_force(Release::DEFAULT).unwrap();
        assert!(settings.expandable_segments);
        assert_eq!((settings.max_split_size, settings.large_segment_size), (u64::MAX, 30 << 20));
        assert_eq!(settings.garbage_collection_threshold, 0.5);
    }

    #[test]
    fn other_backend_is_refused() {
        let text = RecordedValue::Text("backend:cudaMallocAsync".into());
        assert!(recorded(vec![(CONF_VARIABLE, text)]).in_force(Release::DEFAULT).is_err());
    }

    #[test]
    fn divisions_are_read_by_their_keys() {
        let table = vec![("1".into(), 4), ("32768".into(), 8), ("odd".into(), 3), ("65536".into(), 3)];
        let settings = recorded(vec![("roundup_power2_divisions", RecordedValue::Table(table))])
            .in_force(Release::DEFAULT)
            .unwrap();
        let divisions = settings.roundup_power2_divisions;
        assert_eq!((divisions[0], divisions[15], divisions[1]), (4, 8, 0));
    }

    #[test]
    fn written_settings_are_read_back() {
        let conf = "max_split_size_mb:64,roundup_power2_divisions:[64:8,>:2],expandable_segments:True";
        for release in Release::all().skip(1) {
            let settings = AllocatorSettings::of_release(release).updated(conf).unwrap();
            assert_eq!(RecordedSettings::of(&settings, conf).in_force(release), Ok(settings));
        }
    }
}
