//! In which order blocks are placed: what comes first gets the low offsets.

use std::cmp::Reverse;

use serde::Serialize;

use super::lifetimes::{Lifetime, loads};

/// An order of blocks. All but [`Order::Birth`] put the largest first; equals stay in order of allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// As they are allocated.
    Birth,
    /// By bytes.
    Bytes,
    /// By length of life.
    Lifetime,
    /// By bytes times length of life.
    Area,
    /// By the fullest section that they live through, then by area.
    Crowd,
    /// By the fullest section that they live through, then by length of life.
    CrowdLifetime,
}

impl Order {
    /// Those that place long before short or large before small, the most promising first.
    pub const FORESEEING: [Order; 5] = [Order::Bytes, Order::Area, Order::Lifetime, Order::Crowd, Order::CrowdLifetime];

    /// What it sorts by, as in "first fit by size".
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Order::Birth => "birth",
            Order::Bytes => "size",
            Order::Lifetime => "lifetime",
            Order::Area => "area",
            Order::Crowd => "fullest section and area",
            Order::CrowdLifetime => "fullest section and lifetime",
        }
    }

    /// The blocks in this order, by their places in the list.
    pub(super) fn of(self, blocks: &[Lifetime]) -> Vec<u32> {
        let mut order: Vec<u32> = (0..blocks.len() as u32).collect();
        let length = |block: &Lifetime| u128::from(block.end - block.begin);
        let crowds = match self {
            Order::Crowd | Order::CrowdLifetime => crowds(blocks),
            _ => Vec::new(),
        };
        order.sort_by_cached_key(|&place| {
            let block = &blocks[place as usize];
            Reverse(match self {
                Order::Birth => (0, 0),
                Order::Bytes => (u128::from(block.bytes), length(block)),
                Order::Lifetime => (length(block), u128::from(block.bytes)),
                Order::Area => (block.area(), u128::from(block.bytes)),
                Order::Crowd => (u128::from(crowds[place as usize]), block.area()),
                Order::CrowdLifetime => (u128::from(crowds[place as usize]), length(block)),
            })
        });
        order
    }
}

/// The bytes alive in the fullest section that each block lives through.
fn crowds(blocks: &[Lifetime]) -> Vec<u64> {
    const STRETCH: usize = 256;
    let loads = loads(blocks);
    let most = |loads: &[u64]| loads.iter().copied().max().unwrap_or(0);
    let stretches: Vec<u64> = loads.chunks(STRETCH).map(most).collect();
    let crowd = |block: &Lifetime| {
        let (begin, end) = (block.begin as usize, block.end as usize);
        let (first, last) = (begin.div_ceil(STRETCH), end / STRETCH);
        if first >= last {
            return most(&loads[begin..end]);
        }
        let edges = most(&loads[begin..first * STRETCH]).max(most(&loads[last * STRETCH..end]));
        edges.max(most(&stretches[first..last]))
    };
    blocks.iter().map(crowd).collect()
}
