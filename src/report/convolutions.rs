//! Where the workspaces of convolutions come from, in words.

use super::render::counted;
use crate::rehearse::record::RehearsalRecord;

/// The installed cuDNN gave them.
pub(super) fn by_cudnn(record: &RehearsalRecord) -> String {
    let plans = counted(record.convolutions_by_cudnn as usize, "plan", "plans");
    format!(
        "workspaces of convolutions ({plans}) come from the installed cuDNN, asked for a card with these properties"
    )
}

/// A rule gave them.
pub(super) fn by_rule(record: &RehearsalRecord) -> String {
    let plans = counted(record.convolutions_by_rule as usize, "plan", "plans");
    let rule = "follow a rule from measurements on the H200; peaks of whole networks were up to 16 % off";
    match &record.cudnn_reason {
        Some(reason) => format!(
            "workspaces of convolutions ({plans}) {rule}. They come from cuDNN itself where it is installed \
             (nvidia-cudnn-cu12 or nvidia-cudnn-cu13, 9.8 or newer, for the CUDA of PyTorch); here not: {reason}"
        ),
        None => format!(
            "workspaces of convolutions ({plans}) that the installed cuDNN refuses or cannot know without a GPU {rule}"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_source_of_workspaces_is_named_with_the_reason() {
        let mut record =
            RehearsalRecord { convolutions_by_cudnn: 12, convolutions_by_rule: 1, ..RehearsalRecord::default() };
        assert!(by_cudnn(&record).starts_with("workspaces of convolutions (12 plans) come from the installed cuDNN"));
        assert!(
            by_rule(&record).starts_with("workspaces of convolutions (1 plan) that the installed cuDNN refuses or")
        );
        record.cudnn_reason = Some("cuDNN 9 is not installed".into());
        assert!(by_rule(&record).ends_with("here not: cuDNN 9 is not installed"));
    }
}
