//! The memory as it lies, block by block, at chosen moments.

use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use super::Warning;
use crate::{
    device::Device,
    replay::{self, Observer, ReplayError, ReplayMoment, replay},
    strategy::{EventSink, Layout, Strategy},
    trace::Source,
};

/// A layout with more blocks than this is left out of the case file: it would be larger than all the rest together.
const MOST_BLOCKS: usize = 200_000;

/// The memory at the moments that reports draw.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layouts {
    /// At the first failed request.
    pub at_oom: Option<Layout>,
    /// At the allocated peak: only where it was asked for, because it takes a second pass ([`layout_after`]).
    pub at_peak: Option<Layout>,
    /// At the end, before the strategy was closed.
    pub at_end: Option<Layout>,
}

/// The layout, unless it is too large for a file.
pub(super) fn within_bounds(layout: Option<Layout>, warnings: &mut Vec<Warning>) -> Option<Layout> {
    let layout = layout?;
    let blocks = layout.blocks().count();
    if blocks > MOST_BLOCKS {
        warnings.push(Warning::LayoutLeftOut { blocks: blocks as u64 });
        return None;
    }
    Some(layout)
}

/// Replays a source once more, on a fresh strategy and device, up to the event with this number, and returns the memory
/// as it lies right after it. `None` where the strategy cannot show it or the replay ended earlier.
///
/// The strategy is left as it is then, for the caller to close; `options.stop` is not looked at.
pub fn layout_after(
    event: u64,
    source: &dyn Source,
    strategy: &mut dyn Strategy,
    device: &mut dyn Device,
    options: &replay::ReplayOptions<'_>,
) -> Result<Option<Layout>, ReplayError> {
    let reached = AtomicBool::new(false);
    let mut camera = Camera { event, reached: &reached, layout: None };
    let options = replay::ReplayOptions { stop: Some(&reached), ..*options };
    replay(source, strategy, device, &options, &mut camera)?;
    Ok(camera.layout)
}

/// Takes one picture.
struct Camera<'a> {
    event: u64,
    reached: &'a AtomicBool,
    layout: Option<Layout>,
}

impl EventSink for Camera<'_> {}

impl Observer for Camera<'_> {
    fn after(&mut self, now: &ReplayMoment<'_>) {
        if now.index == self.event {
            self.layout = now.strategy.layout();
            self.reached.store(true, Ordering::Relaxed);
        }
    }
}
