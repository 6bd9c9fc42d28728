//! The memory summary that PyTorch's users know, and the table of who asked for memory.

use std::fmt::Write as _;

use comfy_table::{Cell, CellAlignment};

use super::table::{dress_for_terminal, headed};
use crate::{
    answer::summary::{Account, By, MemorySummary, Operation},
    base::Bytes,
};

/// The longest call site that fits on a line.
const LONGEST_NAME: usize = 80;

/// The summary in PyTorch's words.
#[must_use]
pub fn memory_summary(summary: &MemorySummary, width: Option<u16>) -> String {
    let mut table = headed(&["metric", "current", "peak", "total allocated", "total freed"]);
    dress_for_terminal(&mut table, width);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let bytes = |bytes: u64| Bytes(bytes).to_string();
    let count = |count: u64| count.to_string();
    let line = |name: &str, account: Account, show: &dyn Fn(u64) -> String| {
        let cells = [account.current, account.peak, account.total_allocated, account.total_freed].map(show);
        std::iter::once(name.to_owned()).chain(cells).map(Cell::new_owned).collect::<Vec<_>>()
    };
    table.add_row(line("allocated memory", summary.allocated_bytes, &bytes));
    table.add_row(line("active memory", summary.active_bytes, &bytes));
    table.add_row(line("requested memory", summary.requested_bytes, &bytes));
    table.add_row(line("GPU reserved memory", summary.reserved_bytes, &bytes));
    let split = |value: Option<u64>, show: &dyn Fn(u64) -> String| value.map_or_else(|| "-".to_owned(), show);
    let only_current = |name: &str, current: String| [name.to_owned(), current, "-".into(), "-".into(), "-".into()];
    let inactive = only_current("inactive split", split(summary.inactive_split_bytes, &bytes));
    table.add_row(inactive.map(Cell::new_owned));
    table.add_row(line("allocations", summary.allocations, &count));
    table.add_row(line("GPU reserved segments", summary.segments, &count));
    let pieces = only_current("inactive split blocks", split(summary.inactive_split_blocks, &count));
    table.add_row(pieces.map(Cell::new_owned));
    format!(
        "{}\nafter {} events; cudaMalloc retries: {}; CUDA OOMs: {}\n",
        table.trim_fmt(),
        summary.event,
        summary.retries,
        summary.ooms
    )
}

/// The `top` of those who asked for memory.
#[must_use]
pub fn operations(operations: &[Operation], by: By, top: usize, width: Option<u16>) -> String {
    let heading = match by {
        By::Tag => "tag",
        By::Site => "call site",
        By::Size => "size",
    };
    let mut table = headed(&[heading, "requests", "peak self", "alive", "requested in all"]);
    dress_for_terminal(&mut table, width);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for operation in operations.iter().take(top) {
        let name = match by {
            By::Size => operation.name.parse().map_or_else(|_| operation.name.clone(), |size| Bytes(size).to_string()),
            By::Tag | By::Site => operation.name.chars().take(LONGEST_NAME).collect(),
        };
        let cells = [
            name,
            operation.requests.to_string(),
            Bytes(operation.peak_live_bytes).to_string(),
            Bytes(operation.live_bytes).to_string(),
            Bytes(operation.requested_bytes).to_string(),
        ];
        table.add_row(cells.map(Cell::new_owned));
    }
    let mut out = format!("{}\n", table.trim_fmt());
    let left_out = operations.len().saturating_sub(top);
    if left_out > 0 {
        let _ = writeln!(out, "and {left_out} more; --top {} shows them", operations.len());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::MIB;

    #[test]
    fn the_summary_has_the_lines_that_people_look_for() {
        let account = Account { current: 5 * MIB, peak: 9 * MIB, total_allocated: 20 * MIB, total_freed: 15 * MIB };
        let summary = MemorySummary { allocated_bytes: account, event: 7, retries: 2, ooms: 1, ..Default::default() };
        let text = memory_summary(&summary, None);
        for words in
            ["allocated memory", "5.00 MiB", "20.0 MiB", "15.0 MiB", "retries: 2; CUDA OOMs: 1", "after 7 events"]
        {
            assert!(text.contains(words), "'{words}' is missing in\n{text}");
        }
    }

    #[test]
    fn only_the_top_is_shown_and_the_rest_counted() {
        let one = |size: u64| Operation { name: size.to_string(), peak_live_bytes: size, ..Operation::default() };
        let text = operations(&[one(2 * MIB), one(MIB), one(512)], By::Size, 2, None);
        assert!(text.contains("1.00 MiB") && !text.contains("512 B") && text.contains("and 1 more"), "{text}");
    }
}
