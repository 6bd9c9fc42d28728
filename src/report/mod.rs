//! Records as files and tables: the run folder, the comparison, the summary, the table on the terminal, the page.
//!
//! Suites and commands hand over records and details; everything here is made from them or from the files of a run, on
//! any machine. This room looks at no device and prints nothing: it writes into the run's folder and returns text.

mod adversary_table;
mod advice_table;
mod agreement_table;
mod changes;
mod claim_files;
mod claim_table;
mod comparison;
mod dead_end;
mod endurance_table;
mod environment;
mod error;
mod folder;
pub mod html;
mod leak_findings;
mod memory_summary;
mod merge;
mod misuse_table;
mod narrow;
mod plan;
pub mod plot;
mod rank_table;
mod rows;
mod scenario;
mod stress_table;
mod summary;
mod table;
mod technique_files;
mod technique_table;
mod threshold_files;
mod threshold_table;
mod timing_table;
mod waterfall;

pub use adversary_table::{adversary, adversary_csv, adversary_json};
pub use advice_table::{advice, advice_csv, advice_json};
pub use agreement_table::{agreements, agreements_csv, agreements_json};
pub use changes::{changes, changes_json};
pub use claim_files::ClaimFiles;
pub use claim_table::{claims, claims_csv, claims_in_full, claims_json, claims_page};
pub use endurance_table::{endurance, endurance_csv, endurance_json};
pub use environment::{Difference, Environment, Settings, Shard};
pub use error::ReportError;
pub use folder::{RunFolder, copy_run, read_detail, read_environment, read_records, read_timings};
pub use leak_findings::{leaks, leaks_csv, leaks_json};
pub use memory_summary::{memory_summary, operations};
pub use merge::{Flaw, Merged, Shards};
pub use misuse_table::{misuses, misuses_csv, misuses_json};
pub use plan::{PlannedCase, check_plan, write_plan};
pub use rank_table::{ranks, ranks_csv, ranks_json};
pub use rows::save;
pub use stress_table::{verdict_matrix, verdicts, verdicts_csv, verdicts_json};
pub use table::{csv, json, markdown, terminal};
pub use technique_files::TechniqueFiles;
pub use technique_table::{technique_advice, techniques, techniques_csv, techniques_json, techniques_page};
pub use threshold_files::ThresholdFiles;
pub use threshold_table::{Medium, largest, largest_csv, largest_json, thresholds, thresholds_csv, thresholds_json};
pub use timing_table::timings;
pub use waterfall::waterfall;
