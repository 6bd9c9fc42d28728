//! PyTorch's memory summary, and the requests for memory by tag, call site or size.

use super::{Medium, render::TextTable};
use crate::{
    answer::{
        holders::{GroupBy, RequesterUsage},
        summary::{MemorySummary, UsageTotals},
    },
    base::Bytes,
};

/// The longest call site that fits on a line.
const LONGEST_NAME: usize = 80;

/// The summary in the words of `torch.cuda.memory_summary`.
pub fn memory_summary(summary: &MemorySummary, medium: Medium) -> String {
    let headings = ["metric", "current", "peak", "total allocated", "total freed"];
    let mut table = TextTable::new(&headings, medium).with_numbers(1..);
    let bytes = |bytes: u64| Bytes(bytes).to_string();
    let count = |count: u64| count.to_string();
    let line = |name: &str, account: UsageTotals, show: fn(u64) -> String| {
        let UsageTotals { current, peak, total_allocated, total_freed } = account;
        [name.to_owned(), show(current), show(peak), show(total_allocated), show(total_freed)]
    };
    let only_current = |name: &str, current: Option<u64>, show: fn(u64) -> String| {
        let current = current.map_or_else(|| "-".to_owned(), show);
        [name.to_owned(), current, "-".to_owned(), "-".to_owned(), "-".to_owned()]
    };
    table.row(line("allocated memory", summary.allocated_bytes, bytes));
    table.row(line("active memory", summary.active_bytes, bytes));
    table.row(line("requested memory", summary.requested_bytes, bytes));
    table.row(line("GPU reserved memory", summary.reserved_bytes, bytes));
    table.row(only_current("inactive split", summary.inactive_split_bytes, bytes));
    table.row(line("allocations", summary.allocations, count));
    table.row(line("GPU reserved segments", summary.segments, count));
    table.row(only_current("inactive split blocks", summary.inactive_split_blocks, count));
    let MemorySummary { event, retries, ooms, .. } = summary;
    table.finish(&format!("after {event} events; cudaMalloc retries: {retries}; CUDA OOMs: {ooms}"), [])
}

/// In place of call sites.
pub const WITHOUT_STACKS: &str = "call sites are unknown: no call stacks were recorded. Record with stacks=\"python\", as \
                                  `oomph record` does, or group by --by size.";

/// The first of `count` requesters of memory.
pub fn operations(operations: &[RequesterUsage], by: GroupBy, count: usize, medium: Medium) -> String {
    let heading = match by {
        GroupBy::Tag => "tag",
        GroupBy::Site => "call site",
        GroupBy::Size => "size",
    };
    let headings = [heading, "requests", "peak self", "live", "requested in total"];
    let mut table = TextTable::new(&headings, medium).with_numbers(1..);
    for operation in operations {
        let name = match by {
            GroupBy::Size => {
                operation.name.raw().parse().map_or_else(|_| operation.name.to_string(), |size| Bytes(size).to_string())
            }
            GroupBy::Tag | GroupBy::Site => operation.name.to_string().chars().take(LONGEST_NAME).collect(),
        };
        table.row([
            name,
            operation.requests.to_string(),
            Bytes(operation.peak_live_bytes).to_string(),
            Bytes(operation.live_bytes).to_string(),
            Bytes(operation.requested_bytes).to_string(),
        ]);
    }
    match count.saturating_sub(operations.len()) {
        0 => table.finish("", []),
        left_out => table.finish(&format!("and {left_out} more; --top {count} shows them"), []),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::MIB;

    #[test]
    fn summary_has_the_lines_of_pytorch() {
        let account = UsageTotals { current: 5 * MIB, peak: 9 * MIB, total_allocated: 20 * MIB, total_freed: 15 * MIB };
        let summary = MemorySummary { allocated_bytes: account, event: 7, retries: 2, ooms: 1, ..Default::default() };
        let text = memory_summary(&summary, Medium::PIPE);
        for words in
            ["allocated memory", "5.00 MiB", "20.0 MiB", "15.0 MiB", "retries: 2; CUDA OOMs: 1", "after 7 events"]
        {
            assert!(text.contains(words), "'{words}' is missing in\n{text}");
        }
    }

    #[test]
    fn only_the_top_is_shown() {
        let one = |size: u64| RequesterUsage {
            name: size.to_string().into(),
            peak_live_bytes: size,
            ..RequesterUsage::default()
        };
        let text = operations(&[one(2 * MIB), one(MIB)], GroupBy::Size, 3, Medium::PIPE);
        assert!(text.contains("1.00 MiB") && !text.contains("512 B") && text.contains("and 1 more"), "{text}");
    }
}
