//! Who requested memory and who holds it: by category and layer, by call site or by size. Everything is read from the
//! trace, without a replay.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, HashMap},
    ops::ControlFlow,
};

use serde::Serialize;

use crate::{
    base::{FileText, SiteId, TagId},
    measure::digits,
    trace::{
        BlockSlot, Category, Op, Source, Tables, TraceError, failed_when_recorded,
        torch::{Action, MemoryHolder, Recording, SnapshotBlockState, StackFrame, StackId},
    },
};

/// What blocks are grouped by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum GroupBy {
    /// Category: parameters, gradients, optimizer states, activations and so on.
    Category,
    /// Category and layer.
    Tag,
    /// Call site.
    Site,
    /// Requested bytes.
    Size,
}

impl GroupBy {
    /// The most telling property that a source knows.
    fn most_telling(tables: &Tables) -> GroupBy {
        if tables.sites().iter().any(|site| !site.is_empty() && !failed_when_recorded(site)) {
            GroupBy::Site
        } else if tables.tags().len() > 1 {
            GroupBy::Tag
        } else {
            GroupBy::Size
        }
    }

    fn key(self, tables: &Tables, bytes: u64, tag: TagId, site: SiteId) -> u64 {
        match self {
            GroupBy::Category => tables.tags().get(tag.index()).map_or(Category::Unknown, |tag| tag.category) as u64,
            GroupBy::Tag => tag.0.into(),
            GroupBy::Site => site.0.into(),
            GroupBy::Size => bytes,
        }
    }

    fn name(self, tables: &Tables, key: u64) -> FileText {
        let place = usize::try_from(key).unwrap_or(usize::MAX);
        match self {
            GroupBy::Size => key.to_string().into(),
            GroupBy::Category => Category::ALL.get(place).map_or("unknown", |category| category.name()).into(),
            GroupBy::Site => match tables.sites().get(place).filter(|site| !site.is_empty()) {
                None => UNKNOWN_SITE.into(),
                Some(site) => site.clone(),
            },
            GroupBy::Tag => match tables.tags().get(place) {
                None => "unknown".into(),
                Some(tag) => match tag.layer {
                    Some(layer) => format!("{} of layer {layer}", tag.category.name()).into(),
                    None => tag.category.name().into(),
                },
            },
        }
    }
}

const UNKNOWN_SITE: &str = "unknown site";

/// Whether these groups by call site name no site, because no call stacks were recorded.
#[must_use]
pub fn lack_sites(groups: &[RequesterUsage]) -> bool {
    groups.iter().all(|group| group.name.raw() == UNKNOWN_SITE || failed_when_recorded(&group.name))
}

/// What one tag, call site or size has requested. Bytes are as requested, not as rounded by an allocator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RequesterUsage {
    /// The tag, the call site, or the size in bytes.
    pub name: FileText,
    /// Requests.
    pub requests: u64,
    /// All requested bytes.
    pub requested_bytes: u64,
    /// Of which were freed.
    pub freed_bytes: u64,
    /// Of which are alive at the moment.
    pub live_bytes: u64,
    /// Most bytes alive at one time.
    pub peak_live_bytes: u64,
}

impl RequesterUsage {
    fn request(&mut self, bytes: u64) {
        self.requests += 1;
        self.requested_bytes = self.requested_bytes.saturating_add(bytes);
        self.live_bytes = self.live_bytes.saturating_add(bytes);
        self.peak_live_bytes = self.peak_live_bytes.max(self.live_bytes);
    }
}

/// All requesters before an event (before the end without one). Those that held most at one time come first.
pub fn requesters(source: &dyn Source, by: GroupBy, until: Option<u64>) -> Result<Vec<RequesterUsage>, TraceError> {
    let mut found: BTreeMap<u64, RequesterUsage> = BTreeMap::new();
    let mut live = HashMap::new();
    let (_, tables) = super::scan(source, |index, op, tables| {
        match *op {
            _ if until.is_some_and(|until| index >= until) => return ControlFlow::Break(()),
            Op::Alloc { slot, bytes, tag, site, .. } => {
                let key = by.key(tables, bytes, tag, site);
                live.insert(slot, (key, bytes));
                found.entry(key).or_default().request(bytes);
            }
            Op::Free { slot, .. } => {
                if let Some((key, bytes)) = live.remove(&slot)
                    && let Some(usage) = found.get_mut(&key)
                {
                    usage.freed_bytes += bytes;
                    usage.live_bytes -= bytes;
                }
            }
            _ => {}
        }
        ControlFlow::Continue(())
    })?;
    let mut usages: Vec<RequesterUsage> =
        found.into_iter().map(|(key, usage)| RequesterUsage { name: by.name(&tables, key), ..usage }).collect();
    usages.sort_by(|one, other| {
        let weight = |usage: &RequesterUsage| (usage.peak_live_bytes, usage.requested_bytes);
        weight(other).cmp(&weight(one)).then_with(|| by_numbers(one.name.raw(), other.name.raw()))
    });
    Ok(usages)
}

/// The order of two names, with numbers in them compared as numbers: layer 2 comes before layer 10.
fn by_numbers(one: &str, other: &str) -> Ordering {
    let parts = |name: &str| -> Vec<(String, u64)> {
        let words = name.split(' ');
        words.map(|word| word.parse().map_or_else(|_| (word.to_owned(), 0), |number| (String::new(), number))).collect()
    };
    parts(one).cmp(&parts(other)).then_with(|| one.cmp(other))
}

/// A group of blocks whose live bytes grew.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Grower {
    /// What `name` is.
    pub by: GroupBy,
    /// The call site, the tag, or the size in bytes.
    pub name: FileText,
    /// Live bytes, as requested, when the judged steps began.
    pub bytes_before: u64,
    /// And when they ended.
    pub bytes_after: u64,
    /// Live blocks when the judged steps began.
    pub blocks_before: u64,
    /// And when they ended.
    pub blocks_after: u64,
    /// What a step adds.
    #[serde(serialize_with = "digits::whole")]
    pub bytes_per_step: f64,
}

/// What is alive at one moment, by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveInventory {
    /// What the names are.
    by: GroupBy,
    /// Live bytes, as requested, and live blocks.
    totals: BTreeMap<FileText, (u64, u64)>,
}

impl LiveInventory {
    fn new(by: GroupBy, blocks: impl Iterator<Item = (FileText, u64)>) -> LiveInventory {
        let mut totals: BTreeMap<FileText, (u64, u64)> = BTreeMap::new();
        for (name, requested) in blocks {
            let (bytes, count) = totals.entry(name).or_default();
            (*bytes, *count) = (bytes.saturating_add(requested), *count + 1);
        }
        LiveInventory { by, totals }
    }

    /// What is alive just before each of two events of a source. The number of events means the end.
    pub fn at_events(source: &dyn Source, before: u64, after: u64) -> Result<[LiveInventory; 2], TraceError> {
        let mut live = HashMap::new();
        let mut early = None;
        let (_, tables) = super::scan(source, |index, op, _| {
            if index == before {
                early = Some(live.clone());
            }
            match *op {
                _ if index == after => return ControlFlow::Break(()),
                Op::Alloc { slot, bytes, tag, site, .. } => drop(live.insert(slot, (bytes, tag, site))),
                Op::Free { slot, .. } => drop(live.remove(&slot)),
                _ => {}
            }
            ControlFlow::Continue(())
        })?;
        let by = GroupBy::most_telling(&tables);
        let inventory = |live: &HashMap<BlockSlot, (u64, TagId, SiteId)>| {
            let named = |&(bytes, tag, site): &_| (by.name(&tables, by.key(&tables, bytes, tag, site)), bytes);
            LiveInventory::new(by, live.values().map(named))
        };
        Ok([inventory(early.as_ref().unwrap_or(&live)), inventory(&live)])
    }

    /// What is alive at the end of each recording: by call site where all of them have stacks, otherwise by size.
    #[must_use]
    pub fn of_snapshots(recordings: &[Recording]) -> Vec<LiveInventory> {
        let has_stacks = |recording: &Recording| held_blocks(recording).any(|(_, stack)| stack != StackId::NONE);
        let by = if recordings.iter().all(has_stacks) { GroupBy::Site } else { GroupBy::Size };
        let named = |recording: &Recording, (bytes, stack): (u64, StackId)| match by {
            GroupBy::Site => recording.stacks.site(stack).map_or_else(|| UNKNOWN_SITE.into(), FileText::from),
            GroupBy::Category | GroupBy::Tag | GroupBy::Size => bytes.to_string().into(),
        };
        let inventory = |recording: &Recording| {
            LiveInventory::new(by, held_blocks(recording).map(|block| (named(recording, block), block.0)))
        };
        recordings.iter().map(inventory).collect()
    }

    /// The names whose live bytes grew from here to `after`, those that grew most first. `steps` lie between.
    #[must_use]
    pub fn growers(&self, after: &LiveInventory, steps: usize) -> Vec<Grower> {
        let grown = after.totals.iter().map(|(name, &(bytes_after, blocks_after))| {
            let (bytes_before, blocks_before) = self.totals.get(name).copied().unwrap_or_default();
            Grower {
                by: after.by,
                name: name.clone(),
                bytes_before,
                bytes_after,
                blocks_before,
                blocks_after,
                bytes_per_step: (bytes_after as f64 - bytes_before as f64) / steps.max(1) as f64,
            }
        });
        let mut grown: Vec<Grower> = grown.filter(|grower| grower.bytes_after > grower.bytes_before).collect();
        let total: f64 = grown.iter().map(|grower| grower.bytes_per_step).sum();
        grown.retain(|grower| grower.bytes_per_step >= LEAST_SHARE * total);
        grown.sort_by(|one, other| {
            other
                .bytes_per_step
                .total_cmp(&one.bytes_per_step)
                .then_with(|| by_numbers(one.name.raw(), other.name.raw()))
        });
        grown
    }
}

/// Groups that grew by less than this share of all growth are left out.
const LEAST_SHARE: f64 = 0.01;

/// Requested size and stack of every block that the program holds at the end of a recording.
fn held_blocks(recording: &Recording) -> impl Iterator<Item = (u64, StackId)> {
    recording
        .final_segments
        .iter()
        .flat_map(|segment| &segment.blocks)
        .filter(|block| block.state == SnapshotBlockState::Allocated)
        .map(|block| (block.requested_size, block.stack))
}

/// What is held at one moment, by whom and in which sizes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeldMemory {
    /// What the names are: stack frames ([`GroupBy::Site`]), category and layer, or sizes.
    pub by: Option<GroupBy>,
    /// Whether that is where memory ran out and the recording ends; otherwise it is at the peak of live bytes.
    pub at_failure: bool,
    /// Bytes, as requested.
    pub bytes: u64,
    /// Blocks.
    pub blocks: u64,
    /// The outermost names, those that hold most first.
    pub roots: Vec<HeldNode>,
    /// Bytes and blocks by the line of code that a reader can change; empty without call stacks.
    pub sites: Vec<MemoryHolder>,
    /// Bytes by category, the most first; empty if no category is known.
    pub categories: Vec<(&'static str, u64)>,
    /// The smallest size of each power of two with blocks, and their number and bytes.
    pub sizes: Vec<(u64, u64, u64)>,
}

/// A name, and what is held below it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeldNode {
    /// The frame, category, layer or size.
    pub name: FileText,
    /// Whether the frame belongs to an installed package or to Python itself.
    pub is_installed: bool,
    /// Bytes of all blocks below it.
    pub bytes: u64,
    /// Their number.
    pub blocks: u64,
    /// The next names, those that hold most first.
    pub children: Vec<HeldNode>,
}

impl HeldNode {
    fn sort(nodes: &mut [HeldNode]) {
        nodes.sort_by(|one, other| other.bytes.cmp(&one.bytes).then_with(|| one.name.cmp(&other.name)));
        nodes.iter_mut().for_each(|node| HeldNode::sort(&mut node.children));
    }
}

/// A deeper stack loses its outermost frames.
const MOST_FRAMES: usize = 96;

/// A tree of names that is being built.
#[derive(Default)]
struct HeldTree {
    /// In order of appearance, so that every node comes after the one above it, which has the number.
    nodes: Vec<(Option<usize>, HeldNode)>,
    places: BTreeMap<(Option<usize>, FileText), usize>,
}

impl HeldTree {
    /// Adds blocks below the last name of a path. A step of it is a name, and whether it is of an installed package.
    fn add(&mut self, bytes: u64, blocks: u64, path: impl IntoIterator<Item = (FileText, bool)>) {
        let mut above = None;
        for (name, is_installed) in path {
            let place = *self.places.entry((above, name)).or_insert_with_key(|(_, name)| {
                let node = HeldNode { name: name.clone(), is_installed, ..HeldNode::default() };
                self.nodes.push((above, node));
                self.nodes.len() - 1
            });
            let node = &mut self.nodes[place].1;
            (node.bytes, node.blocks) = (node.bytes.saturating_add(bytes), node.blocks + blocks);
            above = Some(place);
        }
    }

    /// The outermost names, with all others below them.
    fn roots(mut self) -> Vec<HeldNode> {
        let mut roots = Vec::new();
        while let Some((above, node)) = self.nodes.pop() {
            match above {
                Some(above) => self.nodes[above].1.children.push(node),
                None => roots.push(node),
            }
        }
        HeldNode::sort(&mut roots);
        roots
    }
}

impl HeldMemory {
    fn of_blocks(by: GroupBy, sizes: impl Iterator<Item = u64> + Clone) -> HeldMemory {
        let mut held = HeldMemory { by: Some(by), ..HeldMemory::default() };
        held.note_sizes(sizes.clone());
        held.blocks = sizes.clone().count() as u64;
        held.bytes = sizes.fold(0, u64::saturating_add);
        held
    }

    fn note_sizes(&mut self, sizes: impl Iterator<Item = u64>) {
        let mut found: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        for bytes in sizes.filter(|bytes| *bytes > 0) {
            let (blocks, total) = found.entry(1 << bytes.ilog2()).or_default();
            (*blocks, *total) = (*blocks + 1, total.saturating_add(bytes));
        }
        self.sizes = found.into_iter().map(|(from, (blocks, bytes))| (from, blocks, bytes)).collect();
    }

    /// What a source holds at the peak of its live bytes, just after event `peak`: by category and layer, or by size if it
    /// has no categories.
    pub fn at_peak(source: &dyn Source, peak: u64) -> Result<HeldMemory, TraceError> {
        let mut live: HashMap<BlockSlot, (u64, TagId)> = HashMap::new();
        let (_, tables) = super::scan(source, |index, op, _| {
            match *op {
                _ if index > peak => return ControlFlow::Break(()),
                Op::Alloc { slot, bytes, tag, .. } => drop(live.insert(slot, (bytes, tag))),
                Op::Free { slot, .. } => drop(live.remove(&slot)),
                _ => {}
            }
            ControlFlow::Continue(())
        })?;
        let by = if tables.tags().len() > 1 { GroupBy::Tag } else { GroupBy::Size };
        let mut held = HeldMemory::of_blocks(by, live.values().map(|&(bytes, _)| bytes));
        if by == GroupBy::Size {
            return Ok(held);
        }
        let mut tree = HeldTree::default();
        let mut categories: BTreeMap<&'static str, u64> = BTreeMap::new();
        for &(bytes, tag) in live.values() {
            let tag = tables.tags().get(tag.0 as usize).copied().unwrap_or_default();
            let total = categories.entry(tag.category.name()).or_default();
            *total = total.saturating_add(bytes);
            let layer = tag.layer.map(|layer| (format!("layer {layer}").into(), false));
            tree.add(bytes, 1, std::iter::once((tag.category.name().into(), false)).chain(layer));
        }
        held.roots = tree.roots();
        held.categories = categories.into_iter().collect();
        held.categories.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
        Ok(held)
    }

    /// What a recorded program holds where memory runs out, or else at the peak of its live bytes, by call stack. `None`
    /// if no call stacks were recorded.
    #[must_use]
    pub fn of_recording(recording: &Recording) -> Option<HeldMemory> {
        let at_failure = recording.dead_end().is_some();
        let blocks = recorded_blocks(recording, at_failure);
        if blocks.iter().all(|&(_, stack)| stack == StackId::NONE) {
            return None;
        }
        let mut held = HeldMemory::of_blocks(GroupBy::Site, blocks.iter().map(|&(bytes, _)| bytes));
        held.at_failure = at_failure;
        let mut by_stack: BTreeMap<StackId, (u64, u64)> = BTreeMap::new();
        for &(bytes, stack) in &blocks {
            let (total, count) = by_stack.entry(stack).or_default();
            (*total, *count) = (total.saturating_add(bytes), *count + 1);
        }
        let mut tree = HeldTree::default();
        let mut sites: BTreeMap<FileText, MemoryHolder> = BTreeMap::new();
        for (stack, (bytes, blocks)) in by_stack {
            tree.add(bytes, blocks, frame_path(recording, stack));
            let site = recording.stacks.site(stack).map_or_else(|| UNKNOWN_SITE.into(), FileText::from);
            let holder = sites.entry(site.clone()).or_insert(MemoryHolder { site, ..MemoryHolder::default() });
            (holder.blocks, holder.bytes) = (holder.blocks + blocks, holder.bytes.saturating_add(bytes));
        }
        held.roots = tree.roots();
        held.sites = sites.into_values().collect();
        // Blocks without a stack come last: nobody can be named.
        held.sites.sort_by_key(|holder| (holder.site.raw() == UNKNOWN_SITE, std::cmp::Reverse(holder.bytes)));
        Some(held)
    }
}

/// The frames of a stack, outermost first, and whether each is of an installed package.
fn frame_path(recording: &Recording, stack: StackId) -> Vec<(FileText, bool)> {
    let frames = recording.stacks.shown_frames(stack);
    // PyTorch may also lie in a folder of its own.
    let is_installed = |frame: &StackFrame| frame.is_installed() || frame.filename.contains("/torch/");
    let path: Vec<_> = frames.map(|frame| (FileText::from(frame.to_string()), is_installed(frame))).collect();
    match path.len() {
        0 => vec![(UNKNOWN_SITE.into(), false)],
        deep => path.into_iter().skip(deep.saturating_sub(MOST_FRAMES)).collect(),
    }
}

/// Requested size and stack of every live block of a recording: where memory runs out at its end, or else at the peak of live
/// bytes.
fn recorded_blocks(recording: &Recording, at_failure: bool) -> Vec<(u64, StackId)> {
    let entries = &recording.witnessed;
    let walk = |until: usize, mut see: Box<dyn FnMut(usize, u64) + '_>| {
        let initial = recording.initial.live();
        let initial = initial.map(|(block, _)| (block.address, (block.requested_size.max(1), block.stack)));
        let mut live: HashMap<_, (u64, StackId)> = initial.collect();
        let mut bytes: u64 = live.values().fold(0, |sum, (bytes, _)| sum.saturating_add(*bytes));
        for (place, entry) in entries[..until].iter().enumerate() {
            match entry.action {
                Action::Alloc => {
                    live.insert(entry.address, (entry.size, entry.stack));
                    bytes = bytes.saturating_add(entry.size);
                }
                Action::FreeRequested => {
                    bytes = bytes.saturating_sub(live.remove(&entry.address).map_or(0, |(bytes, _)| bytes));
                }
                _ => {}
            }
            see(place, bytes);
        }
        live
    };
    let failure = entries.iter().rposition(|entry| entry.action == Action::OutOfMemory).filter(|_| at_failure);
    let until = failure.unwrap_or_else(|| {
        let mut most = (0, 0);
        walk(
            entries.len(),
            Box::new(|place, bytes| {
                if bytes > most.1 {
                    most = (place + 1, bytes)
                }
            }),
        );
        most.0
    });
    walk(until, Box::new(|_, _| ())).into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{base::StreamId, trace::TraceBuilder};

    #[test]
    fn requesters_by_tag_site_and_size() {
        let mut builder = TraceBuilder::new();
        let (weight, input) = (builder.tag(Category::Parameter, Some(1)), builder.tag(Category::Input, None));
        let site = builder.site("train.py:3 step");
        builder.alloc_at(100, StreamId::DEFAULT, weight, site);
        for _ in 0..3 {
            let block = builder.alloc(70, StreamId::DEFAULT, input);
            builder.free(block);
        }
        let builder = builder.finish("builder");
        let found = |by, until| {
            let found = requesters(&builder, by, until).unwrap();
            found
                .iter()
                .map(|one| (one.name.clone(), one.requests, one.peak_live_bytes, one.live_bytes))
                .collect::<Vec<_>>()
        };
        let both = |one: &str, other: &str| vec![(one.into(), 1, 100, 100), (other.into(), 3, 70, 0)];
        assert_eq!(found(GroupBy::Tag, None), both("parameter of layer 1", "input"));
        assert_eq!(found(GroupBy::Site, None), both("train.py:3 step", "unknown site"));
        assert_eq!(found(GroupBy::Size, None), both("100", "70"));
        assert_eq!(found(GroupBy::Size, Some(2)), [("100".into(), 1, 100, 100), ("70".into(), 1, 70, 70)]);
        assert_eq!(found(GroupBy::Size, Some(0)), []);
        assert_eq!(requesters(&builder, GroupBy::Size, None).unwrap()[1].freed_bytes, 210);
    }

    #[test]
    fn growers_are_grouped_by_the_most_telling_property() {
        let grow = |with_tag: bool, with_site: bool| {
            let mut builder = TraceBuilder::new();
            let tag = if with_tag { builder.tag(Category::Activation, Some(3)) } else { TagId(0) };
            let site = if with_site { builder.site("train.py:7 forward") } else { Default::default() };
            for _ in 0..4 {
                builder.alloc_at(1000, StreamId::DEFAULT, tag, site);
                let passing = builder.alloc(5, StreamId::DEFAULT, TagId(0));
                builder.free(passing);
            }
            let [before, after] = LiveInventory::at_events(&builder.finish("grows"), 3, 12).unwrap();
            before.growers(&after, 3)
        };
        for ((with_tag, with_site), (by, name)) in [
            ((false, false), (GroupBy::Size, "1000")),
            ((true, false), (GroupBy::Tag, "activation of layer 3")),
            ((true, true), (GroupBy::Site, "train.py:7 forward")),
        ] {
            let found = grow(with_tag, with_site);
            assert_eq!(found.len(), 1, "{found:?}");
            assert_eq!((found[0].by, found[0].name.raw()), (by, name));
            assert_eq!((found[0].blocks_before, found[0].blocks_after, found[0].bytes_per_step), (1, 4, 1000.0));
        }
    }

    #[test]
    fn small_growth_is_left_out() {
        let inventory = |totals: &[(&str, u64)]| LiveInventory {
            by: GroupBy::Site,
            totals: totals.iter().map(|&(name, bytes)| (name.into(), (bytes, 1))).collect(),
        };
        let before = inventory(&[("a", 100), ("b", 100), ("c", 100)]);
        let after = inventory(&[("a", 100_000), ("b", 50), ("c", 101), ("new", 50_000)]);
        let names: Vec<FileText> = before.growers(&after, 1).into_iter().map(|grower| grower.name).collect();
        assert_eq!(names, ["a", "new"]);
    }

    #[test]
    fn memory_at_the_peak_is_a_tree() {
        let mut builder = TraceBuilder::new();
        let first = builder.tag(Category::Activation, Some(1));
        let second = builder.tag(Category::Activation, Some(2));
        let weight = builder.tag(Category::Parameter, None);
        builder.alloc(100, StreamId::DEFAULT, weight);
        let block = builder.alloc(300, StreamId::DEFAULT, first);
        builder.alloc(50, StreamId::DEFAULT, second);
        builder.free(block);
        let held = HeldMemory::at_peak(&builder.finish("tree"), 2).unwrap();
        assert_eq!((held.by, held.bytes, held.blocks), (Some(GroupBy::Tag), 450, 3));
        assert_eq!(held.categories, [("activation", 350), ("parameter", 100)]);
        let activation = &held.roots[0];
        assert_eq!((activation.name.raw(), activation.bytes, activation.blocks), ("activation", 350, 2));
        let layers: Vec<_> = activation.children.iter().map(|node| (node.name.raw(), node.bytes)).collect();
        assert_eq!(layers, [("layer 1", 300), ("layer 2", 50)]);
        assert_eq!(held.sizes, [(32, 1, 50), (64, 1, 100), (256, 1, 300)]);
    }
}
