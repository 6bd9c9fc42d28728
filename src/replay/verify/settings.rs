//! The settings under which a recording was made, as the model wants them.

use crate::{
    strategy::caching::{Settings, SettingsError},
    trace::torch::{self, Setting},
};

/// Reads the settings of a snapshot: the text gives all of them, and the values beside it, which PyTorch writes as they
/// were in force at the end, have the last word.
pub(super) fn of_recording(recorded: &torch::Settings) -> Result<Settings, SettingsError> {
    let mut settings = Settings::default().updated(recorded.conf())?;
    if let Some(&Setting::Bool(expandable)) = recorded.get("expandable_segments") {
        settings.expandable_segments = expandable;
    }
    if let Some(&Setting::Float(threshold)) = recorded.get("garbage_collection_threshold") {
        settings.garbage_collection_threshold = threshold;
    }
    if let Some(&Setting::Int(bytes)) = recorded.get("max_split_size") {
        // PyTorch writes -1 for no limit.
        settings.max_split_size = u64::try_from(bytes).unwrap_or(u64::MAX);
    }
    if recorded.get("roundup_power2_divisions").is_some() {
        settings.roundup_power2_divisions = recorded.roundup_divisions();
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(values: Vec<(&str, Setting)>) -> torch::Settings {
        torch::Settings { values: values.into_iter().map(|(name, value)| (name.into(), value)).collect() }
    }

    #[test]
    fn the_text_is_read_and_the_values_beside_it_win() {
        let text = Setting::Text("max_split_size_mb:64,large_segment_size_mb:30".into());
        let values = vec![
            ("PYTORCH_CUDA_ALLOC_CONF", text),
            ("expandable_segments", Setting::Bool(true)),
            ("max_split_size", Setting::Int(-1)),
            ("garbage_collection_threshold", Setting::Float(0.5)),
        ];
        let settings = of_recording(&recorded(values)).unwrap();
        assert!(settings.expandable_segments);
        assert_eq!((settings.max_split_size, settings.large_segment_size), (u64::MAX, 30 << 20));
        assert_eq!(settings.garbage_collection_threshold, 0.5);
    }

    #[test]
    fn another_backend_is_refused() {
        let text = Setting::Text("backend:cudaMallocAsync".into());
        assert!(of_recording(&recorded(vec![("PYTORCH_CUDA_ALLOC_CONF", text)])).is_err());
    }
}
