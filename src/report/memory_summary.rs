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

/// The first `top` requesters of memory. Layers with the same figures share a row.
pub fn operations(operations: &[RequesterUsage], by: GroupBy, top: usize, medium: Medium) -> String {
    let heading = match by {
        GroupBy::Category => "category",
        GroupBy::Tag => "tag",
        GroupBy::Site => "call site",
        GroupBy::Size => "size",
    };
    let headings = [heading, "requests", "peak self", "live", "requested\nin total"];
    let mut table = TextTable::new(&headings, medium).with_numbers(1..);
    let folded = folded(operations);
    for (name, operation) in folded.iter().take(top) {
        let name = match by {
            GroupBy::Size => name.parse().map_or_else(|_| name.clone(), |size| Bytes(size).to_string()),
            GroupBy::Category | GroupBy::Tag | GroupBy::Site => name.chars().take(LONGEST_NAME).collect(),
        };
        table.row([
            name,
            operation.requests.to_string(),
            Bytes(operation.peak_live_bytes).to_string(),
            Bytes(operation.live_bytes).to_string(),
            Bytes(operation.requested_bytes).to_string(),
        ]);
    }
    table.fit(&[1, 4]);
    let each = (folded.len() < operations.len()).then(|| "Layers in one row have these figures each.".to_owned());
    let more = match folded.len().saturating_sub(top) {
        0 => None,
        left_out => Some(format!("and {left_out} more; --top {} shows them", folded.len())),
    };
    table.finish(&each.into_iter().chain(more).collect::<Vec<_>>().join("\n"), [])
}

/// The rows of a table: successive layers with the same figures are one.
fn folded(operations: &[RequesterUsage]) -> Vec<(String, &RequesterUsage)> {
    let named = |operation: &RequesterUsage| {
        let name = operation.name.to_string();
        let (tag, layer) = name.split_once(" of layer ")?;
        Some((tag.to_owned(), layer.parse::<u64>().ok()?))
    };
    let same_figures = |one: &RequesterUsage, other: &RequesterUsage| {
        RequesterUsage { name: one.name.clone(), ..other.clone() } == *one
    };
    let follows = |one: &RequesterUsage, next: &RequesterUsage| match (named(one), named(next)) {
        (Some((tag, layer)), Some((same, other))) => tag == same && layer + 1 == other && same_figures(one, next),
        _ => false,
    };
    let rows = operations.chunk_by(|one, next| follows(one, next));
    rows.map(|row| match (named(&row[0]), row.len()) {
        (Some((tag, layer)), more @ 2..) => (format!("{tag} of layers {layer}-{}", layer + more as u64 - 1), &row[0]),
        _ => (row[0].name.to_string(), &row[0]),
    })
    .collect()
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
        let text = operations(&[one(2 * MIB), one(MIB), one(512)], GroupBy::Size, 2, Medium::PIPE);
        assert!(text.contains("1.00 MiB") && !text.contains("512 B") && text.contains("and 1 more; --top 3"), "{text}");
    }

    #[test]
    fn layers_with_the_same_figures_share_a_row() {
        let layer = |name: &str, bytes| RequesterUsage {
            name: name.into(),
            peak_live_bytes: bytes,
            ..RequesterUsage::default()
        };
        let layers = [
            layer("activation of layer 9", MIB),
            layer("activation of layer 10", MIB),
            layer("activation of layer 11", MIB),
            layer("activation of layer 12", 5),
            layer("gradient of layer 13", 5),
        ];
        let names: Vec<String> = folded(&layers).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["activation of layers 9-11", "activation of layer 12", "gradient of layer 13"]);
        let text = operations(&layers, GroupBy::Tag, 1, Medium::PIPE);
        assert!(text.contains("these figures each.\nand 2 more; --top 3 shows them"), "{text}");
    }
}
