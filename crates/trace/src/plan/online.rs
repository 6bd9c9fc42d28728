//! Layouts in order of allocation, as an allocator without foresight would make them on one endless segment.
//!
//! Only the live blocks have to be looked at, so this is the layout that even the longest trace gets.

use super::{fit::Fit, lifetimes::Lifetime};

/// A live block.
struct Tenant {
    offset: u64,
    top: u64,
    end: u32,
}

/// The offsets of the blocks, which are in order of their beginnings.
pub(super) fn place_online(blocks: &[Lifetime], fit: Fit) -> Vec<u64> {
    // By offset.
    let mut tenants: Vec<Tenant> = Vec::new();
    let mut section = 0;
    let mut offsets = Vec::with_capacity(blocks.len());
    for block in blocks {
        if block.begin > section {
            section = block.begin;
            tenants.retain(|tenant| tenant.end > section);
        }
        let (place, offset) = find(&tenants, block.bytes, fit);
        tenants.insert(place, Tenant { offset, top: offset + block.bytes, end: block.end });
        offsets.push(offset);
    }
    offsets
}

/// A place among the tenants, and the offset there.
fn find(tenants: &[Tenant], bytes: u64, fit: Fit) -> (usize, u64) {
    let mut floor = 0;
    let mut narrowest: Option<(u64, usize, u64)> = None;
    for (place, tenant) in tenants.iter().enumerate() {
        let gap = tenant.offset - floor;
        if gap >= bytes {
            match fit {
                Fit::First => return (place, floor),
                Fit::Best if narrowest.is_none_or(|(least, ..)| gap < least) => narrowest = Some((gap, place, floor)),
                Fit::Best => {}
            }
        }
        floor = tenant.top;
    }
    narrowest.map_or((tenants.len(), floor), |(_, place, offset)| (place, offset))
}
