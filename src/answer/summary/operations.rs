//! Who asked for memory: by tag, by call site or by size, from the story alone.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::trace::{Op, Source, Tables, TraceError};

/// What requests are told apart by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum By {
    /// Category and layer.
    Tag,
    /// Call site.
    Site,
    /// Bytes asked for.
    Size,
}

/// What one tag, call site or size has asked for. Bytes are as asked for, not as rounded by an allocator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Operation {
    /// The tag, the call site, or the size in bytes.
    pub name: String,
    /// Requests.
    pub requests: u64,
    /// All bytes that it ever asked for.
    pub requested_bytes: u64,
    /// Of which were given back.
    pub freed_bytes: u64,
    /// Of which are alive at the moment.
    pub live_bytes: u64,
    /// Alive at most at one time.
    pub peak_live_bytes: u64,
}

/// Everyone who asked for memory before an event (to the end without one), those that held most at one time first.
pub fn operations(source: &dyn Source, by: By, until: Option<u64>) -> Result<Vec<Operation>, TraceError> {
    let mut reader = source.open()?;
    let mut chunk = Vec::new();
    let mut found: BTreeMap<u64, Operation> = BTreeMap::new();
    let mut tenants: Vec<Option<(u64, u64)>> = Vec::new();
    let mut left = until.unwrap_or(u64::MAX);
    while left > 0 {
        let (events, _) = reader.lend(&mut chunk)?;
        if events.is_empty() {
            break;
        }
        let taken = usize::try_from(left).unwrap_or(usize::MAX).min(events.len());
        left -= taken as u64;
        for event in &events[..taken] {
            match event.op {
                Op::Alloc { slot, bytes, tag, site, .. } => {
                    let key = match by {
                        By::Tag => tag.0.into(),
                        By::Site => site.0.into(),
                        By::Size => bytes,
                    };
                    let slot = slot as usize;
                    if slot >= tenants.len() {
                        tenants.resize(slot + 1, None);
                    }
                    tenants[slot] = Some((key, bytes));
                    found.entry(key).or_default().asks(bytes);
                }
                Op::Free { slot, .. } => {
                    let tenant = tenants.get_mut(slot as usize).and_then(Option::take);
                    if let Some((operation, bytes)) =
                        tenant.and_then(|(key, bytes)| Some((found.get_mut(&key)?, bytes)))
                    {
                        operation.freed_bytes += bytes;
                        operation.live_bytes -= bytes;
                    }
                }
                _ => {}
            }
        }
    }
    let tables = reader.tables();
    let mut operations: Vec<Operation> =
        found.into_iter().map(|(key, operation)| Operation { name: name(tables, by, key), ..operation }).collect();
    operations.sort_by(|one, other| {
        let weight = |operation: &Operation| (operation.peak_live_bytes, operation.requested_bytes);
        weight(other).cmp(&weight(one)).then_with(|| one.name.cmp(&other.name))
    });
    Ok(operations)
}

impl Operation {
    fn asks(&mut self, bytes: u64) {
        self.requests += 1;
        self.requested_bytes = self.requested_bytes.saturating_add(bytes);
        self.live_bytes = self.live_bytes.saturating_add(bytes);
        self.peak_live_bytes = self.peak_live_bytes.max(self.live_bytes);
    }
}

fn name(tables: &Tables, by: By, key: u64) -> String {
    let place = usize::try_from(key).unwrap_or(usize::MAX);
    match by {
        By::Size => key.to_string(),
        By::Site => match tables.sites().get(place).map(String::as_str) {
            None | Some("") => "unknown site".to_owned(),
            Some(site) => site.to_owned(),
        },
        By::Tag => match tables.tags().get(place) {
            None => "unknown".to_owned(),
            Some(tag) => match tag.layer {
                Some(layer) => format!("{} of layer {layer}", tag.category.name()),
                None => tag.category.name().to_owned(),
            },
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::StreamId,
        trace::{Category, TraceBuilder},
    };

    #[test]
    fn operations_are_told_apart_by_what_is_asked_for() {
        let mut story = TraceBuilder::new();
        let (weight, input) = (story.tag(Category::Parameter, Some(1)), story.tag(Category::Input, None));
        let site = story.site("train.py:3 step");
        story.alloc_at(100, StreamId::DEFAULT, weight, site);
        for _ in 0..3 {
            let block = story.alloc(70, StreamId::DEFAULT, input);
            story.free(block);
        }
        let story = story.finish("story");
        let told = |by, until| {
            let found = operations(&story, by, until).unwrap();
            found
                .iter()
                .map(|one| (one.name.clone(), one.requests, one.peak_live_bytes, one.live_bytes))
                .collect::<Vec<_>>()
        };
        let both = |one: &str, other: &str| vec![(one.to_owned(), 1, 100, 100), (other.to_owned(), 3, 70, 0)];
        assert_eq!(told(By::Tag, None), both("parameter of layer 1", "input"));
        assert_eq!(told(By::Site, None), both("train.py:3 step", "unknown site"));
        assert_eq!(told(By::Size, None), both("100", "70"));
        assert_eq!(told(By::Size, Some(2)), [("100".to_owned(), 1, 100, 100), ("70".to_owned(), 1, 70, 70)]);
        assert_eq!(told(By::Size, Some(0)), []);
        assert_eq!(operations(&story, By::Size, None).unwrap()[1].freed_bytes, 210);
    }
}
