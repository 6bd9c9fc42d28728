//! What users name as SOURCE: a workload, a workload TOML, or a trace file, and how to find it again.
//!
//! A PyTorch snapshot is more than a trace: it is re-lived first, so that the story has the calls of `empty_cache` that
//! the file itself does not record.

use std::{fs, path::Path, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::{
    base::{NoProgress, Progress, did_you_mean},
    device::{
        Device,
        sim::{SimConfig, SimConfigError, SimDevice},
    },
    models::{Recipe, WorkloadError, is_recipe_name},
    replay::verify::{Companion, CompanionError, Verdict, Verification, verify},
    strategy::Setup,
    trace::{
        self, Source, TableFull, TraceError,
        torch::{self, Recording},
    },
};

/// A source by name, with everything that decides what is in it: whoever opens it, in whichever process, reads the same
/// events.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceSpec {
    /// The name of a workload, or the path of a recipe or trace file.
    pub name: String,
    /// Parameters of the workload that are set beyond its recipe: key and value, as people type them.
    pub set: Vec<(String, String)>,
    /// Where the workload's random numbers start from.
    pub seed: u64,
    /// Which GPU of a PyTorch snapshot; without it the first that something is known about.
    pub device_index: Option<u32>,
}

/// A source that cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The recipe or its parameters are wrong; boxed, because it is several times the size of everything else here.
    #[error(transparent)]
    Workload(Box<WorkloadError>),
    /// The trace file cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The recording has more different sites, tags or streams than a trace can hold.
    #[error(transparent)]
    Tables(#[from] TableFull),
    /// The table beside a recording cannot be read.
    #[error(transparent)]
    Companion(#[from] CompanionError),
    /// There is no simulated device to re-live a recording on.
    #[error(transparent)]
    Device(#[from] SimConfigError),
    /// Looks like a path, and leads nowhere.
    #[error("{name}: no such file{}", did_you_mean(suggestion.as_deref()))]
    NoSuchFile {
        /// What was asked for.
        name: String,
        /// The file in that folder whose name is nearest.
        suggestion: Option<String>,
    },
    /// A folder.
    #[error("{0}: is a directory; a trace file was expected")]
    Directory(String),
    /// A folder or a pattern without any.
    #[error("{0}: no recording there; a folder is searched for .pickle, .pkl and .oomph files, compressed or not")]
    NoRankFiles(String),
    /// Parameters for something that has none.
    #[error("--set changes workloads; '{0}' is a trace file")]
    NothingToSet(String),
    /// A choice among GPUs where there is none.
    #[error("--device-index chooses among the GPUs of a PyTorch snapshot")]
    NotASnapshot,
}

impl From<WorkloadError> for SourceError {
    fn from(error: WorkloadError) -> SourceError {
        SourceError::Workload(Box::new(error))
    }
}

impl SourceSpec {
    /// Finds and prepares the source.
    ///
    /// Reports progress while it reads a recording; a workload opens at once.
    pub fn open(&self, progress: &dyn Progress) -> Result<Box<dyn Source>, SourceError> {
        match self.recipe()? {
            Some(_) if self.device_index.is_some() => Err(SourceError::NotASnapshot),
            Some(recipe) => {
                let recipe = self.set.iter().fold(recipe, |recipe, (key, value)| recipe.with(key, value));
                Ok(Box::new(recipe.seed(self.seed).workload()?))
            }
            None if !self.set.is_empty() => Err(SourceError::NothingToSet(self.name.clone())),
            None => Ok(match self.verified_recording(progress)? {
                Some((recording, _)) if recording.initial_layout().is_some() => Box::new(recording),
                Some((recording, _)) => Box::new(recording.trace),
                None => trace::open(Path::new(&self.name), progress)?,
            }),
        }
    }

    /// The source as another thread does it at the same time: a workload with another seed.
    pub(super) fn copy_for(&self, thread: u16) -> Result<Arc<dyn Source>, SourceError> {
        let spec = SourceSpec { seed: self.seed.wrapping_add(thread.into()), ..self.clone() };
        Ok(Arc::from(spec.open(&NoProgress)?))
    }

    /// The source as a recording, if it is a PyTorch snapshot. The snapshot's own limit is used to understand it, and
    /// nowhere else: a replay is limited by its own arguments only.
    pub fn recording(&self, progress: &dyn Progress) -> Result<Option<Recording>, SourceError> {
        Ok(self.verified_recording(progress)?.map(|(recording, _)| recording))
    }

    /// The same, and how well the model re-lives it.
    pub fn verified_recording(
        &self,
        progress: &dyn Progress,
    ) -> Result<Option<(Recording, Verification)>, SourceError> {
        let path = Path::new(&self.name);
        let is_file = path.is_file() && path.extension().is_none_or(|extension| extension != "toml");
        if !is_file || trace::recognise(path)?.name != torch::NAME {
            return if self.device_index.is_some() { Err(SourceError::NotASnapshot) } else { Ok(None) };
        }
        let recording = Recording::open(path, self.device_index, progress)?;
        let device = SimDevice::new(SimConfig::default())?;
        let props = device.props();
        let companion = Companion::beside(path)?.unwrap_or_default();
        let limit = companion.memory_fraction.map(|fraction| (fraction * props.total_bytes as f64) as u64);
        let verification = verify(&recording, &Setup { props, limit }, &companion.counters, progress);
        let recording = match verification.verdict {
            Verdict::Exact => recording
                .with_sizes_before(&verification.sizes_before)
                .with_empty_caches(verification.empty_caches.clone(), progress)?,
            Verdict::Partial { .. } | Verdict::Diverged(_) => recording,
        };
        Ok(Some((recording, verification)))
    }

    /// The recipe, or `None` if the source is a trace file. Opens no trace.
    pub fn recipe(&self) -> Result<Option<Recipe>, SourceError> {
        let path = Path::new(&self.name);
        if path.extension().is_some_and(|extension| extension == "toml") {
            return Ok(Some(Recipe::from_file(path)?));
        }
        if path.is_file() {
            return Ok(None);
        }
        if path.is_dir() {
            return Err(SourceError::Directory(self.name.clone()));
        }
        // Names may have a dot (`gpt-1.3b`).
        if !is_recipe_name(&self.name) && (self.name.contains('/') || path.extension().is_some()) {
            return Err(SourceError::NoSuchFile { name: self.name.clone(), suggestion: nearest_file(path) });
        }
        Ok(Some(Recipe::named(&self.name)?))
    }
}
/// So many slips of the finger make another name.
const SLIPS_AT_MOST: usize = 2;

/// The file whose name is nearest to one that is not there. Endings are alike anyway, so slips are counted.
fn nearest_file(missing: &Path) -> Option<String> {
    let folder = missing.parent().filter(|folder| *folder != Path::new(""));
    let files = fs::read_dir(folder.unwrap_or(Path::new("."))).ok()?;
    let typed = missing.file_name()?.to_string_lossy();
    let names = files.flatten().map(|file| file.file_name().to_string_lossy().into_owned());
    let (slips, name) = names.map(|name| (strsim::levenshtein(&typed, &name), name)).min()?;
    if slips > SLIPS_AT_MOST {
        return None;
    }
    Some(folder.map_or_else(|| name.clone(), |folder| folder.join(&name).display().to_string()))
}
