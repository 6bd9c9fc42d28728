//! Results as text, CSV, JSON, run folders and the page `report.html`.
//!
//! Everything is made from records or from the files of a run, on any machine. This module knows no
//! devices and prints nothing: it returns text and writes into the folder of a run.

mod advice;
mod agreement;
mod cases;
mod changes;
mod checksum;
mod claims;
mod environment;
mod error;
mod fits;
mod folder;
pub mod html;
mod leaks;
mod lock;
mod memory_summary;
mod merge;
mod partition;
mod plan;
pub mod plot;
mod ranks;
mod rehearsals;
mod render;
mod rows;
mod scenario;
mod stored_run;
mod stress;
mod techniques;
mod thresholds;

pub use advice::AdviceReport;
pub use cases::{timings, waterfall};
pub use claims::ClaimReport;
pub use environment::{
    Environment, EnvironmentDifference, OPTIONS_OF_ONE_PROCESS, RunSettings, quoted, without_options,
};
pub use error::ReportError;
pub use folder::{FolderRecord, RecordFolder, RunFolder, read_detail, read_environment, read_records, read_timings};
pub use leaks::{LeakAnswer, LeakReport};
pub use lock::copy_run;
pub use memory_summary::{WITHOUT_STACKS, memory_summary, operations};
pub use merge::Shards;
pub use partition::{Partition, PartitionError, PartitionRule};
pub use plan::PlannedCase;
pub use ranks::RankReport;
pub use rehearsals::{MemoryHolders, RehearsalReport};
pub use render::{Glyphs, Medium, Places, Render, Terminal, flowing, wrapped};
pub use rows::{save, to_checked_csv, to_csv};
#[cfg(test)]
pub(crate) use scenario::comparison_csv;
pub use scenario::{BoundRow, bounds};
pub use stored_run::StoredRun;
pub use stress::{Endurance, VerdictMatrix};
pub use techniques::{no_technique_advice, technique_advice};
pub use thresholds::ThresholdFiles;
