//! What a case leaves behind beside its row: `cases/<id>.json.gz`.

use serde::{Deserialize, Serialize};

use super::{
    CaseLabel, Composition, DriverCalls, Frame, LatencyHistogram, Layouts, OomReport, PhasePeak, SCHEMA, StepPeak,
    TagBytes, Timeline, Warning,
};

/// Everything about a case that does not fit in a row. From this and the row, reports are made on other machines.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaseDetail {
    /// [`SCHEMA`].
    pub schema: u32,
    /// [`CaseLabel::case_id`].
    pub case_id: String,
    /// The identity, part by part.
    pub label: CaseLabel,
    /// Which of several GPUs it ran on, where the label names them all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ran_on: Option<String>,
    /// What a reader of the numbers should know.
    pub warnings: Vec<Warning>,
    /// Failed requests.
    pub ooms: Vec<OomReport>,
    /// Memory over time.
    pub timeline: Timeline,
    /// What live memory is for, over time.
    #[serde(default)]
    pub categories: Vec<Composition>,
    /// Peaks by step.
    pub steps: Vec<StepPeak>,
    /// Peaks by phase.
    pub phases: Vec<PhasePeak>,
    /// Live bytes by category and layer at the allocated peak; they sum to it.
    pub at_peak: Vec<TagBytes>,
    /// Driver time of operations by how they ended.
    pub latencies: Vec<LatencyHistogram>,
    /// Driver calls by kind.
    pub driver: Vec<DriverCalls>,
    /// The strategy's own counters.
    pub strategy_counters: Vec<(String, u64)>,
    /// Memory block by block.
    pub layouts: Layouts,
    /// Pictures of memory over time, in order of their events.
    #[serde(default)]
    pub frames: Vec<Frame>,
}

impl CaseDetail {
    /// A detail with its identity and nothing else: what a skipped case has.
    #[must_use]
    pub fn unmeasured(label: &CaseLabel) -> CaseDetail {
        CaseDetail { schema: SCHEMA, case_id: label.case_id(), label: label.clone(), ..CaseDetail::default() }
    }
}
