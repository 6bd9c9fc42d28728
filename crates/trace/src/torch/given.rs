//! What a user says about a recording because its file does not contain it: the release and the settings.

use serde::{Deserialize, Serialize};

use super::{Action, RecordedSettings, RecordingError, SettingsOrigin, Snapshot};
use oomph_pytorch::{AllocatorSettings, Release};

/// The release and the settings of a recorded program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GivenFacts {
    /// The release of PyTorch.
    pub release: Option<Release>,
    /// The settings, as in `PYTORCH_CUDA_ALLOC_CONF`.
    pub settings: Option<String>,
}

impl Snapshot {
    /// The snapshot with what the user says. An error if the file says something else.
    pub fn with_given(mut self, given: &GivenFacts) -> Result<Snapshot, RecordingError> {
        if let Some(release) = given.release {
            self.release = self.release.told(release)?;
        }
        if let Some(settings) = &given.settings {
            self.take_settings(settings)?;
        }
        Ok(self)
    }

    fn take_settings(&mut self, text: &str) -> Result<(), RecordingError> {
        // The newest possible release that knows them.
        let parsed = |release: Release| AllocatorSettings::of_release(release).updated(text);
        let accepting = self.release.span().releases().rev().find_map(|release| Some((release, parsed(release).ok()?)));
        let Some((release, given)) = accepting else {
            let error = parsed(self.release.assumed()).err().map(|error| error.to_string()).unwrap_or_default();
            return Err(RecordingError::Settings(error));
        };
        if self.settings_from == SettingsOrigin::File {
            return match self.settings.in_force(release) {
                Ok(recorded) if AllocatorSettings { ignored: given.ignored.clone(), ..recorded.clone() } == given => {
                    Ok(())
                }
                _ => {
                    let recorded = self.settings.compact_conf();
                    let recorded = if recorded.is_empty() { "PyTorch's defaults".to_owned() } else { recorded };
                    Err(RecordingError::OtherSettings { recorded, given: text.to_owned() })
                }
            };
        }
        self.settings = RecordedSettings::of_text(text);
        self.settings_from = SettingsOrigin::Given;
        Ok(())
    }

    /// What segments and entries tell about settings that the file does not contain.
    pub(crate) fn inferred_settings(&self) -> RecordedSettings {
        let is_mapped = self.segments.iter().any(|segment| segment.expandable)
            || self.traces.iter().flatten().any(|entry| entry.action == Action::SegmentMap);
        if is_mapped { RecordedSettings::of_text("expandable_segments:True") } else { RecordedSettings::default() }
    }
}
