//! Who grows: live bytes by call site, by tag or by size, at two moments of a story.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::trace::{Op, Source, TraceError};

/// What blocks are told apart by: the most telling thing that the source knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GrownBy {
    /// Where they were asked for.
    Site,
    /// What they are for: category and layer.
    Tag,
    /// How much was asked for.
    Size,
}

/// Blocks that belong together, and how many more of them there are.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Grower {
    /// What `name` is.
    pub by: GrownBy,
    /// The call site, the tag, or the size in bytes.
    pub name: String,
    /// Live bytes, as asked for, when the judged steps began.
    pub bytes_before: u64,
    /// And when they ended.
    pub bytes_after: u64,
    /// Live blocks when the judged steps began.
    pub blocks_before: u64,
    /// And when they ended.
    pub blocks_after: u64,
    /// What a step adds.
    pub bytes_per_step: f64,
}

/// Live bytes and blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holding {
    /// Bytes, as asked for.
    pub bytes: u64,
    /// Blocks.
    pub blocks: u64,
}

/// What is alive at one moment, by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inventory {
    /// What the names are.
    pub by: GrownBy,
    /// In order of names.
    pub holdings: BTreeMap<String, Holding>,
}

/// Keys that grew by less than this share of all growth are not worth a line.
const LEAST_SHARE: f64 = 0.01;

/// The names whose live bytes grew, those that grew most first; `steps` lie between the two moments.
#[must_use]
pub fn growers(before: &Inventory, after: &Inventory, steps: usize) -> Vec<Grower> {
    let mut grown: Vec<Grower> = after
        .holdings
        .iter()
        .map(|(name, now)| {
            let then = before.holdings.get(name).copied().unwrap_or_default();
            Grower {
                by: after.by,
                name: name.clone(),
                bytes_before: then.bytes,
                bytes_after: now.bytes,
                blocks_before: then.blocks,
                blocks_after: now.blocks,
                bytes_per_step: (now.bytes as f64 - then.bytes as f64) / steps.max(1) as f64,
            }
        })
        .filter(|grower| grower.bytes_after > grower.bytes_before)
        .collect();
    let total: f64 = grown.iter().map(|grower| grower.bytes_per_step).sum();
    grown.retain(|grower| grower.bytes_per_step >= LEAST_SHARE * total);
    grown.sort_by(|one, other| other.bytes_per_step.total_cmp(&one.bytes_per_step).then(one.name.cmp(&other.name)));
    grown
}

/// What is alive just before each of two events; the number of events stands for the end.
pub fn inventories(source: &dyn Source, before: u64, after: u64) -> Result<(Inventory, Inventory), TraceError> {
    let mut reader = source.open()?;
    let mut chunk = Vec::new();
    let mut walk = Walk::default();
    let mut index = 0;
    let mut early = None;
    while let (events @ [_, ..], _) = reader.lend(&mut chunk)? {
        for event in events {
            if index == before {
                early = Some(walk.clone());
            }
            if index == after {
                break;
            }
            walk.step(&event.op);
            index += 1;
        }
        if index == after {
            break;
        }
    }
    let tables = reader.tables();
    let by = if tables.sites().len() > 1 {
        GrownBy::Site
    } else if tables.tags().len() > 1 {
        GrownBy::Tag
    } else {
        GrownBy::Size
    };
    let named = |walk: &Walk| {
        let mut holdings: BTreeMap<String, Holding> = BTreeMap::new();
        for block in walk.live.iter().flatten() {
            let name = match by {
                GrownBy::Site => match tables.sites()[block.site].as_str() {
                    "" => "unknown site".to_owned(),
                    site => site.to_owned(),
                },
                GrownBy::Tag => {
                    let tag = tables.tags()[block.tag];
                    match tag.layer {
                        Some(layer) => format!("{} of layer {layer}", tag.category.name()),
                        None => tag.category.name().to_owned(),
                    }
                }
                GrownBy::Size => block.bytes.to_string(),
            };
            let holding = holdings.entry(name).or_default();
            holding.bytes += block.bytes;
            holding.blocks += 1;
        }
        Inventory { by, holdings }
    };
    let late = named(&walk);
    Ok((early.as_ref().map_or_else(|| late.clone(), named), late))
}

/// The blocks that are alive, by slot.
#[derive(Clone, Default)]
struct Walk {
    live: Vec<Option<Alive>>,
}

#[derive(Clone, Copy)]
struct Alive {
    bytes: u64,
    site: usize,
    tag: usize,
}

impl Walk {
    fn step(&mut self, op: &Op) {
        match *op {
            Op::Alloc { slot, bytes, tag, site, .. } => {
                let slot = slot as usize;
                if slot >= self.live.len() {
                    self.live.resize(slot + 1, None);
                }
                self.live[slot] = Some(Alive { bytes, site: site.index(), tag: tag.index() });
            }
            Op::Free { slot, .. } => {
                if let Some(place) = self.live.get_mut(slot as usize) {
                    *place = None;
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::{StreamId, TagId},
        trace::{Category, TraceBuilder},
    };

    #[test]
    fn growers_are_named_by_the_most_telling_thing_there_is() {
        let grow = |with_tag: bool, with_site: bool| {
            let mut story = TraceBuilder::new();
            let tag = if with_tag { story.tag(Category::Activation, Some(3)) } else { TagId(0) };
            let site = if with_site { story.site("train.py:7 forward") } else { Default::default() };
            for _ in 0..4 {
                story.alloc_at(1000, StreamId::DEFAULT, tag, site);
                let passing = story.alloc(5, StreamId::DEFAULT, TagId(0));
                story.free(passing);
            }
            let (before, after) = inventories(&story.finish("grows"), 3, 12).unwrap();
            growers(&before, &after, 3)
        };
        for ((with_tag, with_site), (by, name)) in [
            ((false, false), (GrownBy::Size, "1000")),
            ((true, false), (GrownBy::Tag, "activation of layer 3")),
            ((true, true), (GrownBy::Site, "train.py:7 forward")),
        ] {
            let found = grow(with_tag, with_site);
            assert_eq!(found.len(), 1, "{found:?}");
            assert_eq!((found[0].by, found[0].name.as_str()), (by, name));
            assert_eq!((found[0].blocks_before, found[0].blocks_after, found[0].bytes_per_step), (1, 4, 1000.0));
        }
    }

    #[test]
    fn what_shrinks_or_hardly_grows_is_left_out() {
        let inventory = |holdings: &[(&str, u64)]| Inventory {
            by: GrownBy::Site,
            holdings: holdings.iter().map(|&(name, bytes)| (name.to_owned(), Holding { bytes, blocks: 1 })).collect(),
        };
        let before = inventory(&[("a", 100), ("b", 100), ("c", 100)]);
        let after = inventory(&[("a", 100_000), ("b", 50), ("c", 101), ("new", 50_000)]);
        let names: Vec<String> = growers(&before, &after, 1).into_iter().map(|grower| grower.name).collect();
        assert_eq!(names, ["a", "new"]);
    }
}
