//! How far an answer can be trusted: whether the model re-lives the very recording that the answer is about.

use serde::Serialize;

use crate::replay::verify::{Verdict, Verification};

/// How sure an answer is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Confidence {
    /// Under the settings of the recording the model does what PyTorch did, entry by entry.
    Exact {
        /// How many entries were compared.
        entries: usize,
        /// Blocks that were there before the recording. Where there are any, thresholds are searched with them asked for
        /// first, in address order: how they and the free memory between them really lay depends on what came before.
        blocks_before: usize,
    },
    /// The recording does not tell enough to say.
    Partial {
        /// What it does not tell.
        reasons: Vec<String>,
    },
    /// The model does something else than PyTorch did.
    Diverged {
        /// How many entries agree before that.
        entries_agreed: usize,
        /// The first difference.
        difference: String,
    },
    /// There is no recording to compare with: a workload, or a trace that says what was asked for and not what was
    /// answered.
    Unverified,
}

impl Confidence {
    /// What re-living the recording gives.
    #[must_use]
    pub fn of(verification: &Verification) -> Confidence {
        match &verification.verdict {
            Verdict::Exact => Confidence::Exact {
                entries: verification.agreed,
                blocks_before: verification.beginning.map_or(0, |beginning| beginning.blocks),
            },
            Verdict::Partial { reasons, divergence } => Confidence::Partial {
                reasons: reasons.iter().cloned().chain(divergence.as_ref().map(ToString::to_string)).collect(),
            },
            Verdict::Diverged(divergence) => {
                Confidence::Diverged { entries_agreed: verification.agreed, difference: divergence.to_string() }
            }
        }
    }
}
