//! The data of the charts: one JSON text in the page, compressed.
//!
//! Amounts are in KiB, which is exact enough for charts and short. Exact numbers are in the tables.

use std::io;

use serde::{Serialize, Serializer};

use super::element::{StrategyLook, packed};
use super::first_screen::{FirstChart, RulerChart};
use crate::{
    measure::{
        CaseDetail, CaseRecord, Composition, FrameBlock, FrameSums, LayoutFrame, Lifetimes, OomReport, StepPeak,
        timeline::{IncidentKind, Join, Point, Span},
    },
    strategy::{Refusal, StrategySpec},
    trace::Category,
};

/// A series has at most this many points.
pub(super) const MOST_POINTS: usize = 1000;
/// A stack of categories has at most this many.
const MOST_COMPOSITIONS: usize = 256;
/// More marks of steps cannot be told apart.
const MOST_STEPS: usize = 200;
/// More marks of retries overlap.
const MOST_INCIDENTS: usize = 200;
/// The points of a small line.
pub(super) const SPARK_POINTS: usize = 60;

/// Everything that is drawn.
#[derive(Debug, Default, Serialize)]
pub(super) struct ChartData {
    pub(super) strategies: Vec<String>,
    /// One for each strategy.
    pub(super) looks: Vec<StrategyLook>,
    /// Whether a strategy takes a fixed part of the device, so that its memory says nothing about the program.
    pub(super) fixed: Vec<bool>,
    /// In the order of their codes.
    pub(super) categories: Vec<&'static str>,
    pub(super) timelines: Vec<TimelineChart>,
    pub(super) maps: Vec<MemoryMap>,
    pub(super) addresses: Vec<AddressChart>,
    pub(super) leaks: Vec<LeakChart>,
    pub(super) first: Vec<FirstChart>,
    pub(super) rulers: Vec<RulerChart>,
    pub(super) flames: Vec<FlameChart>,
}

impl ChartData {
    pub(super) fn new(strategies: &[&str]) -> ChartData {
        ChartData {
            strategies: strategies.iter().map(|&name| name.to_owned()).collect(),
            looks: strategies.iter().map(|name| StrategyLook::of(name)).collect(),
            fixed: strategies.iter().map(|&name| StrategySpec::from(name).takes_fixed_part()).collect(),
            categories: Category::ALL.iter().map(|category| category.name()).collect(),
            ..ChartData::default()
        }
    }

    /// As text for a script element.
    pub(super) fn script_text(&self) -> io::Result<String> {
        packed(&serde_json::to_string(self)?)
    }
}

/// Memory over time of some strategies under one workload.
#[derive(Debug, Serialize)]
pub(super) struct TimelineChart {
    pub(super) title: String,
    /// The heading of the section while it is shown, as HTML.
    pub(super) headline: String,
    /// Its main numbers, as HTML.
    pub(super) sentence: String,
    /// The lower bound for every allocator.
    pub(super) bound: Option<u64>,
    /// The cap.
    pub(super) limit: Option<u64>,
    /// Event and number of the steps' beginnings.
    pub(super) steps: Vec<(u64, u32)>,
    /// Live bytes, from the case that came furthest.
    pub(super) live: Option<Series>,
    pub(super) cases: Vec<CaseLines>,
}

/// One case of a chart.
#[derive(Debug, Serialize)]
pub(super) struct CaseLines {
    /// Its place in the list of strategies.
    pub(super) strategy: usize,
    #[serde(serialize_with = "differences")]
    pub(super) events: Vec<u64>,
    /// In microseconds of the device's clock.
    #[serde(serialize_with = "differences")]
    pub(super) time: Vec<u64>,
    pub(super) allocated: Band,
    pub(super) reserved: Band,
    /// Device memory use; left out if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) device: Option<Band>,
    /// Event, microsecond, and whether a request failed or cached memory was given back.
    pub(super) incidents: Vec<(u64, u64, &'static str)>,
    /// Event, then KiB a category.
    pub(super) categories: Vec<Vec<u64>>,
}

/// A series with its own events.
#[derive(Debug, Serialize)]
pub(super) struct Series {
    #[serde(serialize_with = "differences")]
    pub(super) events: Vec<u64>,
    #[serde(flatten)]
    pub(super) band: Band,
}

/// The maximum and minimum of every section; minima are left out if they equal the maxima.
#[derive(Debug, Serialize)]
pub(super) struct Band {
    #[serde(serialize_with = "differences")]
    pub(super) max: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "optional_differences")]
    pub(super) min: Option<Vec<u64>>,
}

/// A series as its first value and the differences that follow, which compress to a quarter. `restored` of
/// `script/state.js` makes it a list again.
fn differences<S: Serializer>(values: &[u64], serializer: S) -> Result<S::Ok, S::Error> {
    let signed = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    let before = std::iter::once(0).chain(values.iter().copied().map(signed));
    let differences: Vec<i64> = values.iter().copied().map(signed).zip(before).map(|(now, then)| now - then).collect();
    std::collections::BTreeMap::from([("differences", differences)]).serialize(serializer)
}

fn optional_differences<S: Serializer>(values: &Option<Vec<u64>>, serializer: S) -> Result<S::Ok, S::Error> {
    match values {
        Some(values) => differences(values, serializer),
        None => serializer.serialize_none(),
    }
}

impl Band {
    fn of(points: &[Point], span: impl Fn(&Point) -> Span) -> Band {
        let max: Vec<u64> = points.iter().map(|point| kib(span(point).max)).collect();
        let min: Vec<u64> = points.iter().map(|point| kib(span(point).min)).collect();
        Band { min: (min != max).then_some(min), max }
    }
}

impl CaseLines {
    pub(super) fn of(strategy: usize, detail: &CaseDetail) -> CaseLines {
        let points = thinned(&detail.timeline.points, MOST_POINTS);
        let incidents = &detail.timeline.incidents;
        // Failures matter most: retries get the remaining marks.
        let is_oom = |kind| kind == IncidentKind::OutOfMemory;
        let mut marks: Vec<_> =
            incidents.iter().filter(|incident| is_oom(incident.kind)).take(MOST_INCIDENTS).collect();
        let room = MOST_INCIDENTS - marks.len();
        let retries: Vec<_> = incidents.iter().filter(|incident| !is_oom(incident.kind)).collect();
        marks.extend(retries.iter().step_by(retries.len().div_ceil(room.max(1)).max(1)).take(room));
        marks.sort_by_key(|incident| incident.event);
        CaseLines {
            strategy,
            events: points.iter().map(|point| point.event).collect(),
            time: points.iter().map(|point| point.time_ns / 1000).collect(),
            allocated: Band::of(&points, |point| point.allocated_bytes),
            reserved: Band::of(&points, |point| point.reserved_bytes),
            device: points
                .iter()
                .any(|point| point.device_used_bytes.is_some())
                .then(|| Band::of(&points, |point| point.device_used_bytes.unwrap_or_default())),
            incidents: marks
                .iter()
                .map(|mark| (mark.event, mark.time_ns / 1000, if is_oom(mark.kind) { "oom" } else { "retry" }))
                .collect(),
            categories: compositions(&detail.categories),
        }
    }
}

/// Live bytes over events.
pub(super) fn live(detail: &CaseDetail) -> Series {
    let points = thinned(&detail.timeline.points, MOST_POINTS);
    Series { events: points.iter().map(|p| p.event).collect(), band: Band::of(&points, |point| point.live_bytes) }
}

/// Where steps begin; of many steps, every n-th.
pub(super) fn steps(steps: &[StepPeak]) -> Vec<(u64, u32)> {
    let stride = steps.len().div_ceil(MOST_STEPS).max(1);
    steps.iter().step_by(stride).map(|step| (step.event, step.first_step)).collect()
}

/// The highest `reserved` of [`SPARK_POINTS`] sections.
pub(super) fn spark(detail: &CaseDetail) -> Vec<u64> {
    thinned(&detail.timeline.points, SPARK_POINTS).iter().map(|point| point.reserved_bytes.max).collect()
}

/// Empty if there is only one category.
fn compositions(all: &[Composition]) -> Vec<Vec<u64>> {
    let kinds = (0..Category::ALL.len()).filter(|&place| all.iter().any(|point| point.bytes[place] > 0)).count();
    if kinds < 2 {
        return Vec::new();
    }
    let stride = all.len().div_ceil(MOST_COMPOSITIONS).max(1);
    all.chunks(stride)
        .filter_map(|section| {
            let fullest = section.iter().max_by_key(|point| point.total)?;
            Some(std::iter::once(section[0].event).chain(fullest.bytes.map(kib)).collect())
        })
        .collect()
}

/// Neighbours joined into at most `most` points; no minimum or maximum is lost.
fn thinned(points: &[Point], most: usize) -> Vec<Point> {
    points
        .chunks(points.len().div_ceil(most).max(1))
        .map(|section| {
            let mut joined = section[0];
            section[1..].iter().for_each(|next| joined.join(next));
            joined
        })
        .collect()
}

/// Memory block by block, at several moments. Amounts are in bytes.
#[derive(Debug, Serialize)]
pub(super) struct MemoryMap {
    pub(super) title: String,
    pub(super) strategy: usize,
    pub(super) frames: Vec<MapFrame>,
    /// The first request that failed.
    failed: Option<FailedAllocation>,
    sites: Vec<String>,
}

/// One moment.
#[derive(Debug, Serialize)]
pub(super) struct MapFrame {
    event: u64,
    occasion: crate::measure::Occasion,
    sums: FrameSums,
    segments: Vec<MapSegment>,
}

/// Pieces, stream, pool, five numbers per block (bytes, state, category, and the requesting event and the call site, or
/// -1; one number of all blocks after the other, each as the difference from the block before, which compresses well), and
/// four numbers per block that several are joined in (its place, how many they are, how many of them are free, and the bytes
/// of these).
type MapSegment = (u32, u16, String, Vec<i64>, Vec<i64>);

/// A request that failed, and the memory that was left.
#[derive(Debug, Serialize)]
pub(super) struct FailedAllocation {
    event: u64,
    requested: u64,
    /// What the strategy asked of the device for it.
    asked: u64,
    /// Free on the device, or up to the limit.
    device_free: u64,
    cached_free: u64,
    /// The largest free block that its stream could have had, where that is known.
    largest_free: Option<u64>,
    cause: &'static str,
    /// A limit, not the device, refused.
    limited: bool,
}

impl FailedAllocation {
    fn of(report: &OomReport) -> FailedAllocation {
        FailedAllocation {
            event: report.event,
            requested: report.requested_bytes,
            asked: report.asked_bytes,
            device_free: report.device_free_bytes,
            cached_free: report.cached_free_bytes,
            largest_free: report.largest_free_bytes,
            cause: report.cause.name(),
            limited: report.refused_by == Refusal::Limit,
        }
    }
}

impl MemoryMap {
    pub(super) fn of(title: &str, strategy: usize, detail: &CaseDetail, most: usize) -> MemoryMap {
        MemoryMap {
            title: title.to_owned(),
            strategy,
            frames: chosen_frames(&detail.frames, most).map(MapFrame::of).collect(),
            failed: detail.ooms.first().map(FailedAllocation::of),
            sites: detail.sites.iter().map(ToString::to_string).collect(),
        }
    }
}

impl MapFrame {
    fn of(frame: &LayoutFrame) -> MapFrame {
        let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let segments = frame.segments.iter().map(|segment| {
            let numbers = |block: &FrameBlock| {
                let (state, category) = block.codes();
                let (born, site) = (block.born.map_or(-1, number), block.site.map_or(-1, i64::from));
                [number(block.bytes), state.into(), category.into(), born, site]
            };
            let blocks = (0..5).flat_map(|column| {
                let mut before = 0;
                segment.blocks.iter().map(move |block| {
                    let now = numbers(block)[column];
                    now - std::mem::replace(&mut before, now)
                })
            });
            let joined = segment.blocks.iter().zip(0..).filter(|(block, _)| block.blocks > 1);
            let joined =
                joined.flat_map(|(block, place)| [place, block.blocks.into(), block.holes.into(), number(block.free)]);
            (segment.pieces, segment.stream, segment.pool.clone(), blocks.collect(), joined.collect())
        });
        MapFrame { event: frame.event, occasion: frame.occasion, sums: frame.sums(), segments: segments.collect() }
    }
}

/// The rectangles of one case, over addresses and events.
#[derive(Debug, Serialize)]
pub(super) struct AddressChart {
    pub(super) title: String,
    pub(super) strategy: usize,
    #[serde(flatten)]
    pub(super) lifetimes: Lifetimes,
    failed: Option<FailedAllocation>,
    sites: Vec<String>,
    /// Events and their times in microseconds; between them the clock is taken to be even.
    clock: (Vec<u64>, Vec<u64>),
    steps: Vec<(u64, u32)>,
}

/// The clock of a chart of addresses has at most this many points.
const MOST_CLOCK_POINTS: usize = 200;

impl AddressChart {
    /// At most `most` blocks; `None` if there are none.
    pub(super) fn of(title: &str, strategy: usize, detail: &CaseDetail, most: usize) -> Option<AddressChart> {
        if detail.lifetimes.blocks.is_empty() {
            return None;
        }
        let points = &detail.timeline.points;
        let ticks = points.iter().step_by(points.len().div_ceil(MOST_CLOCK_POINTS).max(1));
        Some(AddressChart {
            title: title.to_owned(),
            strategy,
            lifetimes: detail.lifetimes.limited(most),
            failed: detail.ooms.first().map(FailedAllocation::of),
            sites: detail.sites.iter().map(ToString::to_string).collect(),
            clock: ticks.chain(points.last()).map(|point| (point.event, point.time_ns / 1000)).unzip(),
            steps: steps(&detail.steps),
        })
    }
}

/// At most `most` frames: those with an occasion, then regular ones.
pub(super) fn chosen_frames(frames: &[LayoutFrame], most: usize) -> impl Iterator<Item = &LayoutFrame> {
    use crate::measure::Occasion::Regular;
    let special = frames.iter().filter(|frame| frame.occasion != Regular).count();
    let room = most.saturating_sub(special);
    let regular = frames.len() - special;
    let stride = if room == 0 { usize::MAX } else { regular.div_ceil(room).max(1) };
    let mut seen = 0;
    frames.iter().filter(move |frame| {
        if frame.occasion != Regular {
            return true;
        }
        seen += 1;
        stride != usize::MAX && (seen - 1) % stride == 0
    })
}

/// What steps keep, with the fitted line.
#[derive(Debug, Serialize)]
pub(super) struct LeakChart {
    pub(super) title: String,
    /// The heading of the section while it is shown, as HTML.
    pub(super) headline: String,
    /// Its main numbers, as HTML.
    pub(super) sentence: String,
    pub(super) strategy: usize,
    pub(super) steps: Vec<u32>,
    pub(super) kept: Vec<u64>,
    pub(super) reserved: Vec<u64>,
    /// Whether `reserved` is that of a step's end; otherwise the highest in it.
    pub(super) reserved_at_end: bool,
    /// The first step of the line, its height there and its slope, in KiB.
    pub(super) fit: (u32, f64, f64),
    pub(super) limit: Option<u64>,
    /// The step in which the fitted line reaches the limit.
    pub(super) reach: Option<u64>,
}

/// Who holds memory at one moment: names as nested bars.
#[derive(Debug, Serialize)]
pub(super) struct FlameChart {
    pub(super) title: String,
    /// What the names are: `stack`, `tag` or `size`.
    pub(super) by: &'static str,
    pub(super) total: u64,
    pub(super) blocks: u64,
    pub(super) roots: Vec<FlameNode>,
}

/// Name, KiB, blocks, whether the frame is of an installed package, and what is below it.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct FlameNode(
    pub(super) String,
    pub(super) u64,
    pub(super) u64,
    pub(super) bool,
    pub(super) Vec<FlameNode>,
);

/// In KiB, to the nearest.
pub(super) fn kib(bytes: u64) -> u64 {
    (bytes.saturating_add(512)) >> 10
}

/// The bound of a case in KiB.
pub(super) fn bound(record: &CaseRecord) -> Option<u64> {
    record.live_peak_rounded_bytes.map(kib)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        measure::{FrameSegment, Occasion, timeline::Timeline},
        strategy::BlockState,
    };

    fn detail(levels: &[u64]) -> CaseDetail {
        let points = levels
            .iter()
            .zip(0..)
            .map(|(&level, event)| {
                let span = Span { min: level, max: level };
                Point {
                    event,
                    time_ns: event * 2000,
                    live_bytes: span,
                    allocated_bytes: span,
                    reserved_bytes: span,
                    device_used_bytes: Some(span),
                }
            })
            .collect();
        CaseDetail { timeline: Timeline { points, ..Timeline::default() }, ..CaseDetail::default() }
    }

    #[test]
    fn long_series_keeps_its_extremes() {
        let mut levels = vec![50 << 20; 5000];
        (levels[1234], levels[4321]) = (1 << 30, 0);
        let lines = CaseLines::of(0, &detail(&levels));
        assert!(lines.events.len() <= MOST_POINTS);
        assert_eq!(lines.reserved.max.iter().max(), Some(&(1 << 20)));
        assert_eq!(lines.reserved.min.unwrap().iter().min(), Some(&0));
    }

    #[test]
    fn short_series_has_no_minima() {
        let lines = CaseLines::of(0, &detail(&[1 << 20, 3 << 20]));
        assert_eq!((lines.reserved.max, lines.reserved.min), (vec![1024, 3072], None));
        assert_eq!(lines.time, [0, 2]);
    }

    #[test]
    fn series_is_written_as_differences() {
        let lines = serde_json::to_value(CaseLines::of(0, &detail(&[3 << 20, 1 << 20, 1 << 20]))).unwrap();
        assert_eq!(lines["reserved"]["max"], serde_json::json!({ "differences": [3072, -2048, 0] }));
    }

    #[test]
    fn unknown_device_use_is_left_out() {
        let mut detail = detail(&[1 << 20, 3 << 20]);
        assert!(CaseLines::of(0, &detail).device.is_some());
        for point in &mut detail.timeline.points {
            point.device_used_bytes = None;
        }
        let lines = serde_json::to_value(CaseLines::of(0, &detail)).unwrap();
        assert!(lines.get("device").is_none() && lines.get("reserved").is_some(), "{lines}");
    }

    #[test]
    fn json_cannot_end_a_script_element() {
        let chart_data = ChartData::new(&["</script><script>alert(1)"]);
        assert!(!chart_data.script_text().unwrap().contains('<'));
    }

    #[test]
    fn frames_with_an_occasion_come_first() {
        let one = FrameBlock::one(512, BlockState::Allocated, Category::Gradient, Some(3));
        let block = FrameBlock { blocks: 3, holes: 1, free: 100, site: Some(0), ..one };
        let frame = |event, occasion| LayoutFrame {
            event,
            occasion,
            sums: None,
            segments: vec![FrameSegment { pieces: 1, stream: 0, pool: "large".to_owned(), blocks: vec![one, block] }],
        };
        let mut frames: Vec<LayoutFrame> = (0..16).map(|event| frame(event, Occasion::Regular)).collect();
        frames.push(frame(16, Occasion::Peak));
        frames.push(frame(17, Occasion::End));
        let events = |most| chosen_frames(&frames, most).map(|frame| frame.event).collect::<Vec<_>>();
        assert_eq!(events(2), [16, 17]);
        assert_eq!(events(10), [0, 2, 4, 6, 8, 10, 12, 14, 16, 17]);
        let detail = CaseDetail { frames: frames.clone(), ..CaseDetail::default() };
        let map = MemoryMap::of("t", 0, &detail, 2);
        assert_eq!(map.frames[0].segments[0].3, [512, 0, 0, 0, 1, 0, 3, 0, -1, 1]);
        assert_eq!(map.frames[0].segments[0].4, [1, 3, 1, 100], "the second block has a hole of 100 bytes");
    }
}
