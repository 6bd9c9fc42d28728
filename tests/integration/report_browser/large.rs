//! The page of five hundred cases with a million events each: the largest pages expected.

use std::collections::BTreeMap;

use oomph::{
    device::DeviceClock,
    measure::{
        CaseDetail, CaseLabel, CaseRecord, Composition, FrameBlock, FrameSegment, LayoutFrame, Levels, Occasion,
        Status, StepPeak,
        timeline::{MOST_POINTS, Point, Span},
    },
    report::html::{DetailStore, PageRun},
};

const WORKLOADS: u64 = 25;
const STRATEGIES: u64 = 20;
const EVENTS: u64 = 1_000_000;

/// The run, with every list at its maximum length.
pub fn run() -> PageRun {
    let mut records = Vec::new();
    let mut details = BTreeMap::new();
    for workload in 0..WORKLOADS {
        for strategy in 0..STRATEGIES {
            let label = CaseLabel {
                suite: "large".to_owned(),
                workload: format!("workload-{workload}"),
                strategy: format!("strategy:parameter_{strategy}:True"),
                device: "sim".to_owned(),
                ..CaseLabel::default()
            };
            let reserved = (20 + workload + strategy) << 30;
            records.push(CaseRecord {
                clock: Some(DeviceClock::Virtual),
                events: Some(EVENTS),
                driver_alloc_calls: Some(9),
                live_peak_bytes: Some(20 << 30),
                live_peak_rounded_bytes: Some(20 << 30),
                peak_allocated_bytes: Some(21 << 30),
                peak_reserved_bytes: Some(reserved),
                peak_device_used_bytes: Some(reserved + (1 << 30)),
                fragmentation_share: Some(0.25),
                internal_fragmentation_share: Some(0.0123456789),
                ..CaseRecord::unmeasured(&label, Status::Completed, "")
            });
            details.insert(label.case_id(), detail(&label, reserved));
        }
    }
    PageRun { name: "large".to_owned(), records, details: DetailStore::Held(details), ..PageRun::default() }
}

fn detail(label: &CaseLabel, reserved: u64) -> CaseDetail {
    let mut detail = CaseDetail::unmeasured(label);
    let stride = EVENTS / MOST_POINTS as u64;
    detail.timeline.points = (0..MOST_POINTS as u64)
        .map(|place| {
            let span =
                |part: u64| Span { min: reserved / part - place * 1_234_567, max: reserved / part + place * 7_654_321 };
            Point {
                event: place * stride,
                time_ns: place * 98_765_432,
                live_bytes: span(4),
                allocated_bytes: span(3),
                reserved_bytes: span(2),
                device_used_bytes: Some(span(1)),
            }
        })
        .collect();
    detail.categories = (0..512)
        .map(|place| {
            let bytes = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10].map(|part| (place + 1) * part * 3_456_789);
            Composition { event: place * EVENTS / 512, bytes, total: bytes.iter().sum() }
        })
        .collect();
    detail.steps = (0..400)
        .map(|step| StepPeak {
            first_step: step,
            last_step: step,
            event: u64::from(step) * EVENTS / 400,
            peak: Levels::default(),
            lowest_allocated_bytes: 1 << 30,
        })
        .collect();
    let block = |place: u64| {
        FrameBlock::from([10_000_000 + place * 4096, place % 4, place % 8, place * 500, place % 50].map(Some).to_vec())
    };
    detail.frames = (0..19)
        .map(|place| LayoutFrame {
            event: (place + 1) * EVENTS / 20,
            occasion: match place {
                10 => Occasion::Peak,
                18 => Occasion::End,
                _ => Occasion::Regular,
            },
            sums: None,
            segments: (0..100)
                .map(|segment| FrameSegment {
                    pieces: 1,
                    stream: 0,
                    pool: "large".to_owned(),
                    blocks: (0..20).map(|number| block(segment * 20 + number)).collect(),
                })
                .collect(),
        })
        .collect();
    detail
}
