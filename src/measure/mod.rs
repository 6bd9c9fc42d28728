//! Observers of a replay, the numbers they give, and the record that a case leaves behind.
//!
//! [`measure`] runs one case and returns its row ([`CaseRecord`]) and everything that does not fit in a row
//! ([`CaseDetail`]). One observer passes each event to what is recorded: [`peaks`], [`timeline`], [`categories`],
//! [`latency`], [`ooms`], [`frames`], [`lifetimes`]. [`timing`] reads the wall clock, [`torch_snapshot`] records a replay as PyTorch would, and [`agreement`] compares
//! devices. This module writes no files and prints nothing.
//!
//! # What the numbers mean
//!
//! | term | meaning |
//! |---|---|
//! | requested | bytes that callers asked for, in blocks that are not yet reusable |
//! | allocated | bytes in blocks that callers hold: requests rounded up as the strategy does (`memory_allocated`) |
//! | active | allocated, and blocks that were freed but wait for a stream to get past them |
//! | reserved | bytes that the strategy has taken from the device (`memory_reserved`) |
//! | device used | whole pages held on the device + the driver's context + libraries: what `nvidia-smi` shows |
//! | peak | the highest value so far, of each term on its own; the *allocated peak* is the first moment at which allocated is highest |
//! | internal fragmentation | 1 - requested / allocated, over the blocks that callers hold at the allocated peak: lost to rounding |
//! | external fragmentation | 1 - largest free piece / all free bytes of the cache, for the stream that asked last, at the allocated peak (read when memory first falls after it) or at the first OOM: 0 if everything free is in one piece |
//! | idle share | 1 - allocated / reserved at one moment: the allocated peak or the reserved peak |
//! | peak gap share | 1 - peak allocated / peak reserved, each at its own moment: how much more than its blocks the strategy needed |
//! | bound | the most bytes alive at one time in the trace itself, as requested and rounded up to 512 B: no allocator can do with less |
//! | packed | the height of the best layout that was found by looking ahead, with every free taking effect at once; an allocator that maps pages can do with less, because it needs no addresses in a row |
//! | driver time | time inside driver calls, waiting included; of one operation: inside the calls that it made |
//!
//! Shares lie between 0 and 1; a share of nothing is left empty. On a virtual clock all of these are deterministic.

pub mod agreement;
mod case;
pub mod categories;
pub mod digits {
    //! How many digits a measured or computed number has in CSV and JSON.
    //!
    //! Shares, ratios and rates have six significant digits: more would be noise, and fewer would hide changes. Amounts of
    //! bytes and times that are averages are whole. Everything else is counted and exact.

    use serde::{Serialize, Serializer};

    /// A number with six significant digits.
    ///
    /// ```
    /// use oomph::measure::digits::six_digits;
    /// assert_eq!(six_digits(1.0 / 3.0), 0.333333);
    /// assert_eq!(six_digits(1.0e-9 / 7.0), 1.42857e-10);
    /// assert_eq!(six_digits(29_761_904.76), 29_761_900.0);
    /// ```
    #[must_use]
    pub fn six_digits(number: f64) -> f64 {
        format!("{number:.5e}").parse().unwrap_or(number)
    }

    /// For `serialize_with`: [`six_digits`].
    pub fn required<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        six_digits(*number).serialize(serializer)
    }

    /// For `serialize_with`: [`six_digits`], where the number is known.
    pub fn optional<S: Serializer>(number: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
        number.map(six_digits).serialize(serializer)
    }

    /// For `serialize_with`: a whole number.
    pub fn whole<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        (number.round() as i64).serialize(serializer)
    }

    /// For `serialize_with`: a whole number, where it is known.
    pub fn optional_whole<S: Serializer>(number: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
        number.map(|number| number.round() as i64).serialize(serializer)
    }
}
#[cfg(test)]
pub(crate) mod fixture;
pub mod frames;
pub mod latency;
pub mod lifetimes;
pub mod ooms;
pub mod peaks;
mod record;
pub mod steps;
pub mod timeline;
pub mod timing;
pub mod torch_snapshot;

pub use agreement::AgreementRecord;
pub use case::{CaseDetail, Layouts, Warning, measure, measure_lives, measure_opened, measure_replay};
pub use categories::{Composition, TagBytes};
pub use frames::{FrameBlock, FrameSegment, FrameSums, LayoutFrame, Occasion};
pub use latency::{DriverCalls, LatencyHistogram};
pub use lifetimes::{LeftOut, LifeColumns, Lifetimes};
pub use ooms::{Obstacle, OomReport, UnusableMemory};
pub use peaks::{Levels, PhasePeak, StepPeak, lost_share};
pub(crate) use record::on_one_line;
pub use record::{CaseLabel, CaseRecord, SCHEMA, Split, Status, file_stem};
pub use steps::{StepTimes, time_steps};
pub use timeline::Timeline;
pub use timing::{
    PassBudget, PassTurn, ThreadSharing, TimingRecord, copies_for_threads, time, time_in_turns, time_threads,
    time_threads_in_turns,
};
