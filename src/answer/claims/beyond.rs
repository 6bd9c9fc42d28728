//! Claims that nothing here can measure, listed with the reason so that none is dropped silently.

use super::{Claim, Group, finding::Finding};

const fn beyond(id: &'static str, statement: &'static str, published: &'static str, test: super::Test) -> Claim {
    Claim { id, group: Group::Beyond, statement, published, lesson: "", command: "", on_gpu: false, test }
}

pub(super) const CLAIMS: &[Claim] = &[
    beyond("accuracy-16-bit", "Training in 16 bits stays within 1-2 points of accuracy", "1-2 points", |_| {
        Ok(Finding::not_measurable("nothing is learnt here: work is run for its memory and its time, over any numbers"))
    }),
    beyond("small-batch-convergence", "A small batch converges more slowly and with more variance", "slower", |_| {
        Ok(Finding::not_measurable("nothing is learnt here: convergence is a matter of data and not of memory"))
    }),
    beyond("system-leaks", "Leaks of the operating system and of other processes take GPU memory", "some", |_| {
        Ok(Finding::not_measurable("only what one process asks of the driver is seen here"))
    }),
    beyond("adoption", "Companies and tools that use these techniques", "figures of adoption", |_| {
        Ok(Finding::not_measurable("a matter of surveys and not of measurement"))
    }),
];
