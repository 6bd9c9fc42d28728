//! What a look at the machine's CUDA brings to light, as values that a person can be shown.

/// How one check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is there and works.
    Ok,
    /// It is not there.
    Missing,
    /// It is there and does not work.
    Broken,
}

/// One check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was looked at.
    pub subject: String,
    /// How it came out.
    pub verdict: Verdict,
    /// What was seen, or why not.
    pub words: String,
}

impl Finding {
    /// A check that succeeds with words or fails with a reason.
    pub(super) fn of(subject: impl Into<String>, outcome: Result<String, (Verdict, String)>) -> Finding {
        let subject = subject.into();
        match outcome {
            Ok(words) => Finding { subject, verdict: Verdict::Ok, words },
            Err((verdict, words)) => Finding { subject, verdict, words },
        }
    }
}
