//! The values of a pickle, in a few vectors: no allocation per value. A container is a chain of ranges of cells.
//!
//! A container is a number, so shared and circular structures cost nothing. Lists of the same containers share
//! their cells: a program has some thousand call stacks, and PyTorch writes one of them for each of millions of
//! entries.

use std::{collections::HashMap, sync::Arc};

use crate::memory_budget::{MemoryBudget, OutOfBudget};

/// The number of a text in a [`PickleHeap`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TextId(pub u32);

/// The number of a list, tuple or dict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeId(pub u32);

/// A value. 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum PickleValue {
    None,
    Bool(bool),
    Int(i64),
    /// An integer above `i64::MAX`.
    Unsigned(u64),
    Float(f64),
    Text(TextId),
    List(NodeId),
    Tuple(NodeId),
    /// Key, value, key, value.
    Dict(NodeId),
}

impl PickleValue {
    /// Its type in Python.
    pub(crate) const fn kind(self) -> &'static str {
        match self {
            PickleValue::None => "None",
            PickleValue::Bool(_) => "a bool",
            PickleValue::Int(_) | PickleValue::Unsigned(_) => "an int",
            PickleValue::Float(_) => "a float",
            PickleValue::Text(_) => "a str",
            PickleValue::List(_) => "a list",
            PickleValue::Tuple(_) => "a tuple",
            PickleValue::Dict(_) => "a dict",
        }
    }

    /// The integer in 64 bits. Some writers write high addresses as negative numbers.
    pub(crate) const fn bits(self) -> Option<u64> {
        match self {
            PickleValue::Int(number) => Some(number as u64),
            PickleValue::Unsigned(number) => Some(number),
            _ => None,
        }
    }

    /// An integer that is not negative.
    pub(crate) const fn unsigned(self) -> Option<u64> {
        match self {
            PickleValue::Int(number) if number >= 0 => Some(number as u64),
            PickleValue::Unsigned(number) => Some(number),
            _ => None,
        }
    }
}

const NOWHERE: u32 = u32::MAX;
/// In [`HeapNode::head`]: the dict is a record, and its number is in the tail.
const RECORD: u32 = u32::MAX - 1;

/// A container: its first and last range of cells.
#[derive(Clone, Copy, Debug)]
struct HeapNode {
    head: u32,
    tail: u32,
}

/// Consecutive cells, and the next range of the container.
#[derive(Clone, Copy, Debug)]
struct CellRange {
    start: u32,
    length: u32,
    next: u32,
}

/// All values of a pickle.
#[derive(Debug)]
pub(crate) struct PickleHeap {
    cells: Vec<PickleValue>,
    pieces: Vec<CellRange>,
    nodes: Vec<HeapNode>,
    texts: Vec<Arc<str>>,
    numbers: HashMap<Arc<str>, TextId>,
    /// The first cells of known lists of containers, by fingerprint.
    runs: HashMap<u64, u32>,
    pub(crate) budget: MemoryBudget,
}

impl PickleHeap {
    /// A heap in which the known texts have the first numbers, in order.
    pub(crate) fn new(known: &[&str], budget: MemoryBudget) -> Result<PickleHeap, OutOfBudget> {
        let mut heap = PickleHeap {
            cells: Vec::new(),
            pieces: Vec::new(),
            nodes: Vec::new(),
            texts: Vec::new(),
            numbers: HashMap::new(),
            runs: HashMap::new(),
            budget,
        };
        for text in known {
            heap.intern(text)?;
        }
        Ok(heap)
    }

    pub(crate) fn intern(&mut self, text: &str) -> Result<TextId, OutOfBudget> {
        if let Some(&number) = self.numbers.get(text) {
            return Ok(number);
        }
        // The text, its reference counts, and its map entry.
        self.budget.charge(text.len() + 64)?;
        let number = TextId(self.texts.len() as u32);
        let text: Arc<str> = text.into();
        self.budget.push(&mut self.texts, Arc::clone(&text))?;
        self.numbers.insert(text, number);
        Ok(number)
    }

    pub(crate) fn text(&self, number: TextId) -> &Arc<str> {
        &self.texts[number.0 as usize]
    }

    pub(crate) fn new_node(&mut self) -> Result<NodeId, OutOfBudget> {
        let number = NodeId(self.nodes.len() as u32);
        self.budget.push(&mut self.nodes, HeapNode { head: NOWHERE, tail: NOWHERE })?;
        Ok(number)
    }

    /// Appends items to a container.
    pub(crate) fn append(&mut self, node: NodeId, items: &[PickleValue]) -> Result<(), OutOfBudget> {
        if items.is_empty() {
            return Ok(());
        }
        let place = self.nodes[node.0 as usize];
        let known = if place.head == NOWHERE { self.known_run(items)? } else { None };
        // The budget keeps both vectors far below 2^32 entries.
        let start = known.unwrap_or(self.cells.len() as u32);
        if known.is_none() {
            self.budget.extend(&mut self.cells, items)?;
        }
        if place.head != NOWHERE {
            let last = &mut self.pieces[place.tail as usize];
            if last.start + last.length == start {
                last.length += items.len() as u32;
                return Ok(());
            }
        }
        let piece = self.pieces.len() as u32;
        self.budget.push(&mut self.pieces, CellRange { start, length: items.len() as u32, next: NOWHERE })?;
        let head = if place.head == NOWHERE {
            piece
        } else {
            self.pieces[place.tail as usize].next = piece;
            place.head
        };
        self.nodes[node.0 as usize] = HeapNode { head, tail: piece };
        Ok(())
    }

    /// The cells with the same items, if all items are dicts. Otherwise remembers that these items come next. Cells never
    /// change: a list with shared cells grows in another range.
    fn known_run(&mut self, items: &[PickleValue]) -> Result<Option<u32>, OutOfBudget> {
        let mut fingerprint = items.len() as u64;
        for item in items {
            let PickleValue::Dict(dict) = item else { return Ok(None) };
            fingerprint = (fingerprint.rotate_left(5) ^ u64::from(dict.0)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
        if let Some(&start) = self.runs.get(&fingerprint) {
            let there = self.cells.get(start as usize..start as usize + items.len());
            return Ok((there == Some(items)).then_some(start));
        }
        // The map entry.
        self.budget.charge(32)?;
        self.runs.insert(fingerprint, self.cells.len() as u32);
        Ok(None)
    }

    /// A key for the contents of a container: equal keys mean equal contents, and shared cells have equal keys.
    pub(crate) fn contents(&self, node: NodeId) -> (u32, u32) {
        let place = self.nodes[node.0 as usize];
        match self.pieces.get(place.head as usize) {
            Some(piece) if place.head == place.tail => (piece.start, piece.length),
            // No range is empty.
            Some(_) => (node.0, 0),
            None => (place.head, place.tail),
        }
    }

    pub(crate) fn is_empty(&self, node: NodeId) -> bool {
        self.nodes[node.0 as usize].head == NOWHERE
    }

    /// Turns an empty dict into a record.
    pub(crate) fn set_record(&mut self, node: NodeId, record: u32) {
        self.nodes[node.0 as usize] = HeapNode { head: RECORD, tail: record };
    }

    /// The record number of a dict.
    pub(crate) fn record(&self, node: NodeId) -> Option<u32> {
        let node = self.nodes[node.0 as usize];
        (node.head == RECORD).then_some(node.tail)
    }

    /// The values of a container; for a dict, keys and values in turn. Empty for a record.
    pub(crate) fn items(&self, node: NodeId) -> impl Iterator<Item = PickleValue> + '_ {
        let mut next = match self.nodes[node.0 as usize].head {
            RECORD => NOWHERE,
            head => head,
        };
        std::iter::from_fn(move || {
            let piece = *self.pieces.get(next as usize)?;
            next = piece.next;
            Some(&self.cells[piece.start as usize..(piece.start + piece.length) as usize])
        })
        .flatten()
        .copied()
    }

    /// Keys and values of a dict.
    pub(crate) fn pairs(&self, node: NodeId) -> impl Iterator<Item = (PickleValue, PickleValue)> + '_ {
        let mut items = self.items(node);
        std::iter::from_fn(move || Some((items.next()?, items.next()?)))
    }

    /// The value of a key. As in Python, the last one counts if the key occurs twice.
    pub(crate) fn get(&self, dict: NodeId, key: TextId) -> Option<PickleValue> {
        self.pairs(dict).filter(|(found, _)| *found == PickleValue::Text(key)).last().map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn items(heap: &PickleHeap, node: NodeId) -> Vec<PickleValue> {
        heap.items(node).collect()
    }

    #[test]
    fn repeated_stacks_share_their_cells() {
        let mut heap = PickleHeap::new(&[], MemoryBudget::of(200 << 10)).unwrap();
        let frames: Vec<PickleValue> = (0..30).map(|_| PickleValue::Dict(heap.new_node().unwrap())).collect();
        let lists: Vec<NodeId> = (0..2000)
            .map(|_| {
                let list = heap.new_node().unwrap();
                heap.append(list, &frames).unwrap();
                list
            })
            .collect();
        assert!(lists.iter().all(|&list| items(&heap, list) == frames));
        assert!(lists.iter().all(|&list| heap.contents(list) == heap.contents(lists[0])));
        assert_eq!(heap.cells.len(), 30);
    }

    #[test]
    fn a_list_that_goes_on_takes_no_other_with_it() {
        let mut heap = PickleHeap::new(&[], MemoryBudget::of(1 << 20)).unwrap();
        let frames: Vec<PickleValue> = (0..3).map(|_| PickleValue::Dict(heap.new_node().unwrap())).collect();
        let [one, other, more] = [(); 3].map(|()| heap.new_node().unwrap());
        heap.append(one, &frames).unwrap();
        heap.append(other, &frames).unwrap();
        heap.append(one, &[PickleValue::None]).unwrap();
        heap.append(other, &frames[..1]).unwrap();
        heap.append(more, &frames).unwrap();
        assert_eq!(items(&heap, one), [&frames[..], &[PickleValue::None]].concat());
        assert_eq!(items(&heap, other), [&frames[..], &frames[..1]].concat());
        assert_eq!(items(&heap, more), frames);
        let names = [one, other, more].map(|list| heap.contents(list));
        assert!(names[0] != names[1] && names[1] != names[2] && names[0] != names[2], "{names:?}");
    }
}
