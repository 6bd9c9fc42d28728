//! Costs of driver calls: measured medians by size and condition, interpolated; nominal costs where
//! nothing was measured.

use crate::device::CallKind;
use oomph_base::Nanos;

/// What decides the cost of a call besides its kind and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CostCondition {
    /// None of the others.
    Usual,
    /// `cuMemAlloc` and `cuMemFree` of a block that shares its page with others: the driver takes no page from the device
    /// and gives none back.
    SharedPage,
    /// `cuMemAllocAsync` from a pool that has to take memory from the device first. The size is what the pool takes.
    PoolGrows,
}

impl CostCondition {
    pub(in crate::device) const ALL: [CostCondition; 3] =
        [CostCondition::Usual, CostCondition::SharedPage, CostCondition::PoolGrows];

    /// What a profile has after the name of the call. Older profiles have other words there, which say how a usual call
    /// was measured.
    pub(in crate::device) const fn words(self) -> &'static str {
        match self {
            CostCondition::Usual => "",
            CostCondition::SharedPage => "(shared page)",
            CostCondition::PoolGrows => "(pool grows)",
        }
    }
}

/// Costs of driver calls by kind, condition and size.
///
/// Between two measured sizes the cost is linear in the size, as work per page is. Below the
/// smallest it is constant, beyond the largest the last slope goes on. A kind with one measured
/// size costs the same at every size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CostTable {
    /// By [`CostCondition`], then by [`CallKind`]; ascending in size.
    curves: [Vec<Vec<CostPoint>>; CostCondition::ALL.len()],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CostPoint {
    bytes: u64,
    cost: Nanos,
}

/// Why a table of driver-call costs is invalid.
#[derive(Debug, thiserror::Error)]
pub enum CostTableError {
    /// An unknown call.
    #[error("the table of driver-call costs names an unknown call '{0}'")]
    UnknownCall(String),
    /// An impossible cost.
    #[error("the table of driver-call costs gives {median_us} us for '{call}'")]
    ImpossibleCost {
        /// Which call.
        call: String,
        /// What it says.
        median_us: f64,
    },
}

/// Nominal costs for calls that were not measured: their order of magnitude on a machine of this
/// class. Only page-locking grows with the size.
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

/// The cost of one call of one size.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Cost {
    /// The driver's name of the call, and its [condition](CostCondition) in parentheses.
    pub call: String,
    /// How much it requested or gave back; 0 for calls without a size.
    pub bytes: u64,
    /// The median in microseconds.
    pub median_us: f64,
    /// The 99th percentile in microseconds, for information.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99_us: Option<f64>,
}

impl CostTable {
    /// A table of these costs, with nominal costs for other calls.
    ///
    /// ```
    /// use oomph_alloc::device::{CallKind, sim::{Cost, CostTable}};
    /// use oomph_base::Nanos;
    /// let alloc = |bytes, median_us| Cost { call: "cuMemAlloc".to_owned(), bytes, median_us, p99_us: None };
    /// let table = CostTable::of([alloc(512, 40.0), alloc(1024, 60.0)]).unwrap();
    /// assert_eq!(table.cost(CallKind::MemAlloc, 768), Nanos(50_000));
    /// ```
    pub fn of(costs: impl IntoIterator<Item = Cost>) -> Result<CostTable, CostTableError> {
        let mut curves = CostCondition::ALL.map(|_| vec![Vec::new(); CallKind::ALL.len()]);
        // Some profiles have costs of the first call in a process, which belong to its start, as the context does.
        let later = costs.into_iter().filter(|cost| !cost.call.ends_with("(first call)"));
        for Cost { call, bytes, median_us, .. } in later {
            let Some((kind, condition)) = kind_and_condition(&call) else {
                return Err(CostTableError::UnknownCall(call));
            };
            if !(median_us >= 0.0 && median_us.is_finite()) {
                return Err(CostTableError::ImpossibleCost { call, median_us });
            }
            let cost = Nanos((median_us * 1e3).round() as u64);
            curves[condition as usize][kind as usize].push(CostPoint { bytes, cost });
        }
        for &(kind, points) in NOMINAL {
            let curve: &mut Vec<CostPoint> = &mut curves[CostCondition::Usual as usize][kind as usize];
            if curve.is_empty() {
                curve.extend(points.iter().map(|&(bytes, nanos)| CostPoint { bytes, cost: Nanos(nanos) }));
            }
        }
        for curve in curves.iter_mut().flatten() {
            curve.sort_by_key(|point| point.bytes);
            curve.dedup_by_key(|point| point.bytes);
        }
        Ok(CostTable { curves })
    }

    /// The cost of a usual call. Zero for a kind without a measured or nominal cost.
    #[must_use]
    pub fn cost(&self, kind: CallKind, bytes: u64) -> Nanos {
        self.cost_under(CostCondition::Usual, kind, bytes)
    }

    /// The cost of a call under a condition: that of a usual call where the condition was not measured.
    #[must_use]
    pub fn cost_under(&self, condition: CostCondition, kind: CallKind, bytes: u64) -> Nanos {
        let measured =
            [condition, CostCondition::Usual].map(|each| self.curves[each as usize][kind as usize].as_slice());
        let curve = if measured[0].is_empty() { measured[1] } else { measured[0] };
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

/// What a row of the table is about. Allocations from a stream-ordered pool were once measured with
/// the call that uses the default pool, which costs the same.
fn kind_and_condition(call: &str) -> Option<(CallKind, CostCondition)> {
    let (name, words) = call.split_once(' ').unwrap_or((call, ""));
    let kind = match name {
        "cuMemAllocAsync" => CallKind::MemAllocAsync,
        name => CallKind::named(name)?,
    };
    let condition = CostCondition::ALL.into_iter().find(|condition| condition.words() == words);
    Some((kind, condition.unwrap_or(CostCondition::Usual)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::sim::Profile;
    use oomph_base::{GIB, MIB};

    fn row(call: &str, bytes: u64, median_us: f64) -> Cost {
        Cost { call: call.to_owned(), bytes, median_us, p99_us: None }
    }

    #[test]
    fn measured_sizes_cost_what_was_measured() {
        let table = CostTable::of([
            row("cuMemFree", GIB, 600.0),
            row("cuMemFree", 512, 37.5),
            row("cuMemAddressReserve", 160 * GIB, 12.704),
            row("cuMemAllocAsync (pool warm)", 512, 0.482),
        ])
        .unwrap();
        for (kind, bytes, nanos) in [
            (CallKind::MemFree, GIB, 600_000),
            (CallKind::MemFree, 512, 37_500),
            (CallKind::AddressReserve, 160 * GIB, 12_704),
            (CallKind::AddressReserve, 2 * MIB, 12_704),
            (CallKind::MemAllocAsync, MIB, 482),
            (CallKind::Launch, 0, 2_000),
        ] {
            assert_eq!(table.cost(kind, bytes), Nanos(nanos), "{kind} {bytes}");
        }
    }

    #[test]
    fn a_condition_has_its_own_costs_where_it_was_measured() {
        let table = CostTable::of([
            row("cuMemAlloc", 2 * MIB, 40.0),
            row("cuMemAlloc (shared page)", 512, 2.5),
            row("cuMemAlloc (first call)", 0, 190.0),
        ])
        .unwrap();
        let under = |condition| table.cost_under(condition, CallKind::MemAlloc, 4096).0;
        assert_eq!(under(CostCondition::Usual), 40_000);
        assert_eq!(under(CostCondition::SharedPage), 2_500);
        assert_eq!(under(CostCondition::PoolGrows), 40_000, "not measured");
        assert_eq!(table.cost(CallKind::MemAlloc, 0).0, 40_000, "first calls do not count");
    }

    #[test]
    fn every_kind_has_a_cost() {
        let table = Profile::h200().costs;
        for kind in CallKind::ALL {
            assert!(table.cost(kind, MIB) > Nanos::ZERO, "{kind}");
        }
    }

    #[test]
    fn costs_are_interpolated_and_extrapolated() {
        let rows = [(512, 40.0), (20 * MIB, 50.0), (256 * MIB, 180.0), (8 * GIB, 4_800.0)];
        let table = CostTable::of(rows.map(|(bytes, median_us)| row("cuMemFree", bytes, median_us))).unwrap();
        let cost = |bytes| table.cost(CallKind::MemFree, bytes).0;
        assert!(cost(20 * MIB) < cost(100 * MIB) && cost(100 * MIB) < cost(256 * MIB));
        assert_eq!(cost(1), cost(512));
        let (at_eight, at_sixteen) = (cost(8 * GIB), cost(16 * GIB));
        assert!((1.9..2.1).contains(&(at_sixteen as f64 / at_eight as f64)), "{at_eight} {at_sixteen}");
    }

    #[test]
    fn invalid_tables_are_refused() {
        let refused = |call, median_us| CostTable::of([row(call, 1, median_us)]).unwrap_err().to_string();
        assert!(refused("cuMemAlok", 1.0).contains("unknown call 'cuMemAlok'"));
        assert!(refused("cuMemAlloc", -1.0).contains("-1 us for 'cuMemAlloc'"));
        assert!(refused("cuMemAlloc", f64::NAN).contains("NaN us for 'cuMemAlloc'"));
    }
}
