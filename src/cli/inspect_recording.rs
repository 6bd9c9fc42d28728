//! What `oomph inspect` tells of a PyTorch snapshot beyond its story: settings, memory at the end, what is not known.

use std::{collections::BTreeMap, fmt::Write as _};

use serde::Serialize;

use crate::{
    base::Bytes,
    trace::torch::{BlockState, OwnLimit, Recording, SegmentKind},
};

/// What only a recording has.
#[derive(Debug, Serialize)]
pub struct About {
    device_index: u32,
    devices: Vec<u32>,
    settings: String,
    entries: BTreeMap<&'static str, u64>,
    segments: Vec<Tally>,
    blocks: Vec<Tally>,
    largest_free_bytes: u64,
    annotations: BTreeMap<String, u64>,
    empty_caches: usize,
    /// The limit that the program had set itself.
    own_limit: Option<OwnLimit>,
    /// What the file does not tell, a sentence each.
    missing: Vec<String>,
}

/// How many of a kind there are, and their bytes.
#[derive(Debug, Serialize)]
struct Tally {
    kind: &'static str,
    count: u64,
    bytes: u64,
}

fn tally(kind: &'static str, sizes: impl Iterator<Item = u64>) -> Tally {
    let (count, bytes) = sizes.fold((0, 0), |(count, sum): (u64, u64), size| (count + 1, sum.saturating_add(size)));
    Tally { kind, count, bytes }
}

impl About {
    pub fn of(recording: &Recording) -> About {
        let mut entries = BTreeMap::new();
        for entry in &recording.witnessed {
            *entries.entry(entry.action.name()).or_default() += 1;
        }
        let mut annotations = BTreeMap::new();
        for annotation in &recording.annotations {
            *annotations.entry(annotation.name.to_string()).or_default() += 1;
        }
        let segments = &recording.final_segments;
        let of_kind = |name, kind, expandable| {
            let chosen =
                segments.iter().filter(move |segment| segment.kind == kind && segment.expandable == expandable);
            tally(name, chosen.map(|segment| segment.total_size))
        };
        let all = || segments.iter().flat_map(|segment| &segment.blocks);
        let in_state =
            |name, state| tally(name, all().filter(move |block| block.state == state).map(|block| block.size));
        let free = all().filter(|block| block.state == BlockState::Inactive).map(|block| block.size);
        About {
            device_index: recording.device,
            devices: recording.devices.clone(),
            settings: recording.settings.conf().to_owned(),
            entries,
            segments: vec![
                of_kind("small", SegmentKind::Small, false),
                of_kind("large", SegmentKind::Large, false),
                of_kind("small expandable", SegmentKind::Small, true),
                of_kind("large expandable", SegmentKind::Large, true),
            ],
            blocks: vec![
                in_state("allocated", BlockState::Allocated),
                in_state("waiting", BlockState::PendingFree),
                in_state("free", BlockState::Inactive),
            ],
            largest_free_bytes: free.max().unwrap_or(0),
            annotations,
            empty_caches: recording.empty_caches.len(),
            own_limit: recording.own_limit(),
            missing: recording.gaps.sentences(),
        }
    }
}

/// How many names are listed before the rest is only counted.
const NAMES_SHOWN: usize = 8;

/// The lines for people.
pub fn text(about: &About) -> String {
    let mut out = String::new();
    let mut line = |label: &str, value: String| {
        let _ = writeln!(out, "{label:<12} {value}");
    };
    if about.devices.len() > 1 {
        let devices: Vec<String> = about.devices.iter().map(u32::to_string).collect();
        line("device", format!("{} of {}; --device-index chooses", about.device_index, devices.join(", ")));
    }
    let settings = if about.settings.is_empty() { "PyTorch's defaults" } else { &about.settings };
    line("settings", settings.to_owned());
    let entries: Vec<String> = about.entries.iter().map(|(name, count)| format!("{count} {name}")).collect();
    line("recorded", entries.join(", "));
    let listed = |tallies: &[Tally]| {
        let shown = tallies.iter().filter(|tally| tally.count > 0);
        let texts: Vec<String> =
            shown.map(|tally| format!("{} {} ({})", tally.count, tally.kind, Bytes(tally.bytes))).collect();
        if texts.is_empty() { "none".to_owned() } else { texts.join(", ") }
    };
    line("segments", format!("at the end: {}", listed(&about.segments)));
    line("blocks", format!("at the end: {}; largest free {}", listed(&about.blocks), Bytes(about.largest_free_bytes)));
    if let Some(OwnLimit { at_least_bytes, below_bytes }) = about.own_limit {
        let (at_least, below) = (Bytes(at_least_bytes), Bytes(below_bytes));
        line("own limit", format!("{at_least} or more, less than {below}: requests failed while the GPU had room"));
    }
    if about.empty_caches > 0 {
        line("empty_cache", format!("called {} times, as far as can be inferred", about.empty_caches));
    }
    if !about.annotations.is_empty() {
        let names: Vec<&str> = about.annotations.keys().take(NAMES_SHOWN).map(String::as_str).collect();
        let more = about.annotations.len().saturating_sub(NAMES_SHOWN);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        line("annotations", format!("{}{more}", names.join(", ")));
    }
    for (place, sentence) in about.missing.iter().enumerate() {
        line(if place == 0 { "not known" } else { "" }, sentence.clone());
    }
    out
}
