//! How long work was measured to take, by kind and size, and what follows for sizes between.

use serde::{Deserialize, Serialize};

use oomph_base::{Dtype, Nanos, ProductRole, Work};

/// One piece of work and how long it took.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkTime {
    /// The median in microseconds.
    pub median_us: f64,
    /// The 99th percentile in microseconds, for people to see.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99_us: Option<f64>,
    /// What was run.
    #[serde(rename = "shape")]
    pub work: Work,
}

impl WorkTime {
    /// Floating-point operations per nanosecond, or bytes where there is no arithmetic: thousands of the one are
    /// TFLOP/s, and the other is GB/s.
    #[must_use]
    pub fn per_ns(&self) -> f64 {
        size(&self.work) / (self.median_us * 1e3)
    }
}

/// A time that no work can take.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{median_us} us for {work:?} is no time that work can take")]
pub struct ImpossibleTime {
    median_us: f64,
    work: Work,
}

/// Measured times by kind of work.
///
/// Between two measured sizes the speed goes from the one's to the other's, in step with the logarithm of the size. The
/// smallest measured work takes as long as any smaller, and the largest runs at the speed of any larger.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkTable {
    curves: Vec<(Kind, Vec<Point>)>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Point {
    size: f64,
    per_ns: f64,
}

impl Point {
    fn nanos(&self) -> f64 {
        self.size / self.per_ns
    }
}

/// Work that is compared by its size alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Products whose rows start on the boundaries that fast kernels want are told from those whose rows do not: a
    /// vocabulary of 50257 is the usual offender. How slow those are depends on which rows it is.
    Product {
        dtype: Dtype,
        ragged: Option<ProductRole>,
    },
    Attention {
        dtype: Dtype,
        backward: bool,
    },
    Elementwise,
    Reduction,
    CopyIn {
        pinned: bool,
    },
    CopyOut {
        pinned: bool,
    },
}

impl Kind {
    fn of(work: &Work) -> Option<Kind> {
        Some(match *work {
            Work::Spin { .. } => return None,
            Work::Gemm { m, n, k, dtype, role, .. } => {
                let [left, right] = role.row_lengths(m, n, k);
                let aligned = [left, right, n].iter().all(|row| row.is_multiple_of(8));
                Kind::Product { dtype, ragged: (!aligned).then_some(role) }
            }
            Work::Attention { dtype, backward, .. } => Kind::Attention { dtype, backward },
            Work::Elementwise { .. } => Kind::Elementwise,
            Work::Reduction { .. } => Kind::Reduction,
            Work::CopyIn { pinned, .. } => Kind::CopyIn { pinned },
            Work::CopyOut { pinned, .. } => Kind::CopyOut { pinned },
        })
    }

    /// The kind whose times will do where this one was not measured.
    fn stand_in(self) -> Option<Kind> {
        match self {
            Kind::Product { dtype, ragged: Some(_) } => Some(Kind::Product { dtype, ragged: None }),
            Kind::Reduction => Some(Kind::Elementwise),
            _ => None,
        }
    }
}

/// What work is compared by: arithmetic, or bytes where there is none.
fn size(work: &Work) -> f64 {
    match work {
        Work::Gemm { .. } | Work::Attention { .. } => work.flops(),
        _ => work.traffic_bytes(),
    }
}

impl WorkTable {
    /// A table of these times. Where a size was measured more than once, in several shapes, their mean speed counts.
    pub fn of(times: impl IntoIterator<Item = WorkTime>) -> Result<WorkTable, ImpossibleTime> {
        let mut table = WorkTable::default();
        for time in times {
            let WorkTime { median_us, work, .. } = time;
            if !(median_us > 0.0 && median_us.is_finite()) {
                return Err(ImpossibleTime { median_us, work });
            }
            let Some(kind) = Kind::of(&work) else { continue };
            let point = Point { size: size(&work), per_ns: time.per_ns() };
            if point.size < 1.0 {
                continue;
            }
            match table.curves.iter_mut().find(|(known, _)| *known == kind) {
                Some((_, curve)) => curve.push(point),
                None => table.curves.push((kind, vec![point])),
            }
        }
        for (_, curve) in &mut table.curves {
            curve.sort_by(|a, b| a.size.total_cmp(&b.size));
            *curve = curve.chunk_by(|a, b| a.size == b.size).map(mean).collect();
        }
        Ok(table)
    }

    /// How long a piece of work takes; `None` where nothing of its kind was measured.
    #[must_use]
    pub fn duration(&self, work: &Work) -> Option<Nanos> {
        let kind = Kind::of(work)?;
        let (own, stand_in) = (self.curve(kind), kind.stand_in().and_then(|kind| self.curve(kind)));
        let size = size(work);
        let nanos = match (own, stand_in) {
            // Only large work of this kind was measured: smaller work is as many times slower than its likes as that was.
            (Some(own), Some(likes)) if size < own.first()?.size => {
                let smallest = own.first()?;
                let times_slower = smallest.nanos() / time_on(likes, smallest.size)?;
                time_on(likes, size)? * times_slower
            }
            (own, likes) => time_on(own.or(likes)?, size)?,
        };
        Some(Nanos(nanos.round() as u64))
    }

    fn curve(&self, kind: Kind) -> Option<&[Point]> {
        self.curves.iter().find(|(known, _)| *known == kind).map(|(_, curve)| curve.as_slice())
    }
}

/// Nanoseconds for work of a size, by the points of its kind.
fn time_on(curve: &[Point], size: f64) -> Option<f64> {
    let (first, last) = (curve.first()?, curve.last()?);
    Some(if size <= first.size {
        first.nanos()
    } else if size >= last.size {
        size / last.per_ns
    } else {
        let upper = curve.partition_point(|point| point.size < size);
        let (below, above) = (curve[upper - 1], curve[upper]);
        let way = (size / below.size).ln() / (above.size / below.size).ln();
        size / (below.per_ns + way * (above.per_ns - below.per_ns))
    })
}

/// Points of one size as one.
fn mean(points: &[Point]) -> Point {
    let per_ns = points.iter().map(|point| point.per_ns).sum::<f64>() / points.len() as f64;
    Point { size: points[0].size, per_ns }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn product(m: u32, dtype: Dtype) -> Work {
        Work::Gemm { m, n: 1024, k: 1024, batch: 1, dtype, role: ProductRole::Output }
    }

    fn took(work: Work, median_us: f64) -> WorkTime {
        WorkTime { median_us, p99_us: None, work }
    }

    fn table() -> WorkTable {
        WorkTable::of([
            took(product(8192, Dtype::Bf16), 40.0),
            took(product(1024, Dtype::Bf16), 10.0),
            took(Work::Elementwise { bytes: 1_000_000 }, 2.0),
        ])
        .unwrap()
    }

    #[test]
    fn measured_work_takes_what_was_measured() {
        assert_eq!(table().duration(&product(8192, Dtype::Bf16)), Some(Nanos(40_000)));
        assert_eq!(table().duration(&product(1024, Dtype::Bf16)), Some(Nanos(10_000)));
    }

    #[test]
    fn beyond_what_was_measured_small_work_takes_as_long_and_large_work_runs_as_fast() {
        assert_eq!(table().duration(&product(8, Dtype::Bf16)), Some(Nanos(10_000)));
        assert_eq!(table().duration(&product(81_920, Dtype::Bf16)), Some(Nanos(400_000)));
    }

    #[test]
    fn small_work_of_which_only_large_was_measured_is_slower_than_its_likes_by_as_much() {
        let ragged = |m| Work::Gemm { m, n: 1024, k: 1025, batch: 1, dtype: Dtype::Bf16, role: ProductRole::Output };
        let measured = [took(product(8200, Dtype::Bf16), 40.0), took(product(1024, Dtype::Bf16), 10.0)];
        // 8192 x 1025 and 8200 x 1024 are the same arithmetic, within a thousandth.
        let table = WorkTable::of(measured.into_iter().chain([took(ragged(8192), 80.0)])).unwrap();
        let Nanos(small) = table.duration(&ragged(1023)).unwrap();
        assert!((19_900..20_100).contains(&small), "{small} ns");
    }

    #[test]
    fn what_was_not_measured_is_taken_from_its_likes_or_not_known() {
        assert_eq!(table().duration(&product(8192, Dtype::F32)), None);
        assert_eq!(table().duration(&Work::Reduction { bytes: 1_000_000 }), Some(Nanos(2_000)));
        let ragged = Work::Gemm { m: 1024, n: 1023, k: 1024, batch: 1, dtype: Dtype::Bf16, role: ProductRole::Output };
        assert_eq!(table().duration(&ragged), Some(Nanos(10_000)));
        assert_eq!(table().duration(&Work::Spin { nanos: Nanos(5) }), None);
    }

    #[test]
    fn ragged_products_have_times_of_their_own_where_they_were_measured() {
        let ragged =
            Work::Gemm { m: 1024, n: 50_257, k: 1024, batch: 1, dtype: Dtype::Bf16, role: ProductRole::Output };
        let table = WorkTable::of([took(product(1024, Dtype::Bf16), 10.0), took(ragged, 900.0)]).unwrap();
        assert_eq!(table.duration(&ragged), Some(Nanos(900_000)));
        // The same numbers in another role have rows of other lengths.
        let Work::Gemm { m, n, k, batch, dtype, .. } = ragged else { unreachable!() };
        let of_weight = Work::Gemm { m: n, n: k, k: m, batch, dtype, role: ProductRole::WeightGradient };
        assert!(table.duration(&of_weight) < Some(Nanos(900_000)), "slow only where it was measured to be");
        let as_output = Work::Gemm { m: n, n: k, k: m, batch, dtype, role: ProductRole::Output };
        let likes = Work::Gemm { m: 50_256, n: k, k: m, batch, dtype, role: ProductRole::Output };
        let [Nanos(as_output), Nanos(likes)] = [as_output, likes].map(|work| table.duration(&work).unwrap());
        assert!(as_output.abs_diff(likes) < likes / 1000, "many rows are not ragged rows");
    }

    #[test]
    fn shapes_of_one_size_count_with_their_mean_speed() {
        let turned = Work::Gemm { m: 1024, n: 8192, k: 1024, batch: 1, dtype: Dtype::F32, role: ProductRole::Output };
        let table = WorkTable::of([took(product(8192, Dtype::F32), 100.0), took(turned, 50.0)]).unwrap();
        assert_eq!(table.duration(&turned), Some(Nanos(66_667)));
    }

    #[test]
    fn impossible_times_are_refused_in_words() {
        let refused = WorkTable::of([took(product(8, Dtype::F32), 0.0)]).unwrap_err().to_string();
        assert!(refused.starts_with("0 us for Gemm"), "{refused}");
    }

    proptest! {
        #[test]
        fn more_work_of_a_kind_never_runs_faster_than_the_fastest_measured(bytes in 1u64..1 << 40) {
            let measured = [(1_000, 2.0), (1_000_000, 3.0), (1_000_000_000, 300.0)]
                .map(|(bytes, median_us)| took(Work::Elementwise { bytes }, median_us));
            let fastest = measured.iter().map(WorkTime::per_ns).fold(0.0, f64::max);
            let took = WorkTable::of(measured).unwrap().duration(&Work::Elementwise { bytes }).unwrap();
            prop_assert!(took.0 as f64 + 1.0 >= bytes as f64 / fastest && took >= Nanos(2_000));
        }
    }
}
