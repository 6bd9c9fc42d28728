//! What driver calls cost: measured medians by size, interpolated; nominal figures where nothing was measured.

use std::sync::LazyLock;

use crate::{device::CallKind, unit::Nanos};

/// Costs of driver calls by kind and size.
///
/// Between two measured sizes the cost is linear in the size, as work per page is. Below the smallest it is constant,
/// beyond the largest the last slope goes on. A kind with one measured size costs the same at every size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CostTable {
    /// By [`CallKind`], ascending in size.
    curves: Vec<Vec<Point>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Point {
    bytes: u64,
    cost: Nanos,
}

/// The text is not a table of driver-call costs.
#[derive(Debug, thiserror::Error)]
pub enum CostTableError {
    /// Not CSV, or a column is missing or not a number.
    #[error("the table of driver-call costs cannot be read: {0}")]
    Csv(#[from] csv::Error),
    /// A call that nobody knows.
    #[error("the table of driver-call costs names an unknown call '{0}'")]
    UnknownCall(String),
    /// A cost that no call can have.
    #[error("the table of driver-call costs gives {median_us} us for '{call}'")]
    ImpossibleCost {
        /// Which call.
        call: String,
        /// What it says.
        median_us: f64,
    },
}

/// Nominal costs, for calls whose cost was not measured: the order of magnitude that such calls have on a machine of
/// this class. Page-locking is the one that grows with the size.
const NOMINAL: &[(CallKind, &[(u64, u64)])] = &[
    (CallKind::MemGetInfo, &[(0, 20_000)]),
    (CallKind::StreamCreate, &[(0, 10_000)]),
    (CallKind::StreamSynchronize, &[(0, 2_000)]),
    (CallKind::StreamWaitEvent, &[(0, 500)]),
    (CallKind::CtxSynchronize, &[(0, 4_000)]),
    (CallKind::EventCreate, &[(0, 500)]),
    (CallKind::EventRecord, &[(0, 1_000)]),
    (CallKind::EventQuery, &[(0, 500)]),
    (CallKind::EventSynchronize, &[(0, 1_000)]),
    (CallKind::EventDestroy, &[(0, 500)]),
    (CallKind::AddressFree, &[(0, 5_000)]),
    (CallKind::PoolCreate, &[(0, 10_000)]),
    (CallKind::PoolDestroy, &[(0, 10_000)]),
    (CallKind::PoolSetAttribute, &[(0, 500)]),
    (CallKind::PoolGetAttribute, &[(0, 500)]),
    (CallKind::PoolTrim, &[(0, 40_000)]),
    (CallKind::HostAlloc, &[(0, 20_000), (1 << 30, 250_000_000)]),
    (CallKind::HostFree, &[(0, 20_000), (1 << 30, 80_000_000)]),
    (CallKind::Launch, &[(0, 2_000)]),
];

/// What one call of one size costs.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Cost {
    /// The driver's name of the call; words after the name say how it was measured.
    pub call: String,
    /// How much it asked for or gave back; 0 where there is no size.
    pub bytes: u64,
    /// The median in microseconds.
    pub median_us: f64,
    /// The 99th percentile in microseconds, for people to see.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99_us: Option<f64>,
}

impl CostTable {
    /// Reads a CSV with the columns `call`, `bytes` and `median_us`; others are ignored. Calls that it does not
    /// name have nominal costs.
    ///
    /// ```
    /// use oomph::{device::{CallKind, sim::CostTable}, unit::Nanos};
    /// let table = CostTable::parse("call,bytes,median_us\ncuMemAlloc,512,40\ncuMemAlloc,1024,60\n").unwrap();
    /// assert_eq!(table.cost(CallKind::MemAlloc, 768), Nanos(50_000));
    /// ```
    pub fn parse(text: &str) -> Result<CostTable, CostTableError> {
        let costs: Vec<Cost> = csv::Reader::from_reader(text.as_bytes()).deserialize().collect::<Result<_, _>>()?;
        CostTable::of(costs)
    }

    /// A table of these costs, nominal ones for calls that are not among them.
    pub fn of(costs: impl IntoIterator<Item = Cost>) -> Result<CostTable, CostTableError> {
        let mut curves = vec![Vec::new(); CallKind::ALL.len()];
        for Cost { call, bytes, median_us, .. } in costs {
            let Some(kind) = kind_named(&call) else { return Err(CostTableError::UnknownCall(call)) };
            if !(median_us >= 0.0 && median_us.is_finite()) {
                return Err(CostTableError::ImpossibleCost { call, median_us });
            }
            curves[kind as usize].push(Point { bytes, cost: Nanos((median_us * 1e3).round() as u64) });
        }
        for &(kind, points) in NOMINAL {
            let curve: &mut Vec<Point> = &mut curves[kind as usize];
            if curve.is_empty() {
                curve.extend(points.iter().map(|&(bytes, nanos)| Point { bytes, cost: Nanos(nanos) }));
            }
        }
        for curve in &mut curves {
            curve.sort_by_key(|point| point.bytes);
            curve.dedup_by_key(|point| point.bytes);
        }
        Ok(CostTable { curves })
    }

    /// What was measured on an H200, driver CUDA 13.0.
    #[must_use]
    pub fn h200() -> CostTable {
        #[expect(clippy::expect_used, reason = "the table is part of this crate, and a test reads it")]
        static TABLE: LazyLock<CostTable> = LazyLock::new(|| {
            CostTable::parse(include_str!("h200_driver_costs.csv")).expect("the committed table is well formed")
        });
        TABLE.clone()
    }

    /// What one call costs. Zero for a kind that has neither a measured nor a nominal figure.
    #[must_use]
    pub fn cost(&self, kind: CallKind, bytes: u64) -> Nanos {
        let curve = self.curves[kind as usize].as_slice();
        let (first, last) = match curve {
            [] => return Nanos::ZERO,
            [only] => return only.cost,
            [first, .., last] => (first, last),
        };
        if bytes <= first.bytes {
            return first.cost;
        }
        let upper = curve.partition_point(|point| point.bytes < bytes).min(curve.len() - 1);
        let (below, above) = (curve[upper - 1], curve[upper]);
        if bytes > last.bytes && above.cost < below.cost {
            return last.cost;
        }
        let slope = (above.cost.0 as f64 - below.cost.0 as f64) / (above.bytes - below.bytes) as f64;
        Nanos((below.cost.0 as f64 + slope * (bytes - below.bytes) as f64).round() as u64)
    }
}

/// The kind that a row of the table speaks of. Allocations from a stream-ordered pool were measured through the
/// call that uses the default pool, which does the same.
fn kind_named(call: &str) -> Option<CallKind> {
    match call.split_once(' ').map_or(call, |(name, _)| name) {
        "cuMemAllocAsync" => Some(CallKind::MemAllocAsync),
        name => CallKind::ALL.iter().copied().find(|kind| kind.name() == name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unit::{GIB, MIB};

    #[test]
    fn measured_sizes_cost_what_was_measured() {
        let table = CostTable::h200();
        for (kind, bytes, nanos) in [
            (CallKind::MemAlloc, 512, 44_080),
            (CallKind::MemAlloc, 20 * MIB, 47_078),
            (CallKind::MemAlloc, 8 * GIB, 1_225_423),
            (CallKind::MemFree, GIB, 595_822),
            (CallKind::MemSetAccess, 256 * MIB, 57_300),
            (CallKind::MemMap, 2 * MIB, 1_000),
            (CallKind::AddressReserve, 160 * GIB, 12_704),
            (CallKind::AddressReserve, 2 * MIB, 12_704),
            (CallKind::MemAllocAsync, 512, 482),
        ] {
            assert_eq!(table.cost(kind, bytes), Nanos(nanos), "{kind} {bytes}");
        }
    }

    #[test]
    fn every_kind_has_a_cost() {
        let table = CostTable::h200();
        for &kind in CallKind::ALL {
            assert!(table.cost(kind, MIB) > Nanos::ZERO, "{kind}");
        }
    }

    #[test]
    fn costs_lie_between_their_neighbours_and_go_on_beyond_the_last() {
        let table = CostTable::h200();
        let cost = |bytes| table.cost(CallKind::MemFree, bytes).0;
        assert!(cost(20 * MIB) < cost(100 * MIB) && cost(100 * MIB) < cost(256 * MIB));
        assert_eq!(cost(1), cost(512));
        let (at_eight, at_sixteen) = (cost(8 * GIB), cost(16 * GIB));
        assert!((1.9..2.1).contains(&(at_sixteen as f64 / at_eight as f64)), "{at_eight} {at_sixteen}");
    }

    #[test]
    fn a_bad_table_is_refused_in_words() {
        let refused = |text: &str| CostTable::parse(text).map(|_| ()).unwrap_err().to_string();
        assert!(refused("call,bytes,median_us\ncuMemAlok,1,1\n").contains("unknown call 'cuMemAlok'"));
        assert!(refused("call,bytes,median_us\ncuMemAlloc,1,-1\n").contains("-1 us for 'cuMemAlloc'"));
        assert!(refused("call,bytes,median_us\ncuMemAlloc,x,1\n").contains("cannot be read"));
    }
}
