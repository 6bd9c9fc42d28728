//! Values of a pickle, flat in a few vectors: no heap object per value, containers are chains of ranges.
//!
//! Shared and even circular structures cost nothing extra, because a container is a number. Whoever walks them decides
//! how deep to look.

use std::{collections::HashMap, sync::Arc};

use super::{Budget, Spent};

/// A number in [`Heap`]'s texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(in crate::trace::torch) struct TextId(pub u32);

/// A number of a list, tuple or dict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(in crate::trace::torch) struct NodeId(pub u32);

/// A value. 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::trace::torch) enum Value {
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

impl Value {
    /// What Python calls its type.
    pub(in crate::trace::torch) const fn kind(self) -> &'static str {
        match self {
            Value::None => "None",
            Value::Bool(_) => "a bool",
            Value::Int(_) | Value::Unsigned(_) => "an int",
            Value::Float(_) => "a float",
            Value::Text(_) => "a str",
            Value::List(_) => "a list",
            Value::Tuple(_) => "a tuple",
            Value::Dict(_) => "a dict",
        }
    }

    /// The integer in 64 bits. Writers that know only signed integers show high addresses as negative numbers.
    pub(in crate::trace::torch) const fn bits(self) -> Option<u64> {
        match self {
            Value::Int(number) => Some(number as u64),
            Value::Unsigned(number) => Some(number),
            _ => None,
        }
    }

    /// An integer that is not negative.
    pub(in crate::trace::torch) const fn unsigned(self) -> Option<u64> {
        match self {
            Value::Int(number) if number >= 0 => Some(number as u64),
            Value::Unsigned(number) => Some(number),
            _ => None,
        }
    }
}

const NOWHERE: u32 = u32::MAX;
/// In [`Node::head`]: the dict became the record whose number is in the tail.
const RECORD: u32 = u32::MAX - 1;

/// A container: its first and last piece.
#[derive(Clone, Copy, Debug)]
struct Node {
    head: u32,
    tail: u32,
}

/// Some consecutive cells, and where the container goes on.
#[derive(Clone, Copy, Debug)]
struct Piece {
    start: u32,
    length: u32,
    next: u32,
}

/// Everything that a pickle holds.
#[derive(Debug)]
pub(in crate::trace::torch) struct Heap {
    cells: Vec<Value>,
    pieces: Vec<Piece>,
    nodes: Vec<Node>,
    texts: Vec<Arc<str>>,
    numbers: HashMap<Arc<str>, TextId>,
    pub(in crate::trace::torch) budget: Budget,
}

impl Heap {
    /// Texts known beforehand get the first numbers, in order.
    pub(super) fn new(known: &[&str], budget: Budget) -> Result<Heap, Spent> {
        let mut heap = Heap {
            cells: Vec::new(),
            pieces: Vec::new(),
            nodes: Vec::new(),
            texts: Vec::new(),
            numbers: HashMap::new(),
            budget,
        };
        for text in known {
            heap.intern(text)?;
        }
        Ok(heap)
    }

    pub(super) fn intern(&mut self, text: &str) -> Result<TextId, Spent> {
        if let Some(&number) = self.numbers.get(text) {
            return Ok(number);
        }
        // The text itself, its counts, and its place in the map.
        self.budget.charge(text.len() + 64)?;
        let number = TextId(self.texts.len() as u32);
        let text: Arc<str> = text.into();
        self.budget.push(&mut self.texts, Arc::clone(&text))?;
        self.numbers.insert(text, number);
        Ok(number)
    }

    pub(in crate::trace::torch) fn text(&self, number: TextId) -> &Arc<str> {
        &self.texts[number.0 as usize]
    }

    pub(super) fn new_node(&mut self) -> Result<NodeId, Spent> {
        let number = NodeId(self.nodes.len() as u32);
        self.budget.push(&mut self.nodes, Node { head: NOWHERE, tail: NOWHERE })?;
        Ok(number)
    }

    /// Appends items to a container.
    pub(super) fn append(&mut self, node: NodeId, items: &[Value]) -> Result<(), Spent> {
        if items.is_empty() {
            return Ok(());
        }
        // The budget keeps both vectors far below 2^32 entries.
        let start = self.cells.len() as u32;
        self.budget.extend(&mut self.cells, items)?;
        let place = self.nodes[node.0 as usize];
        if place.head != NOWHERE {
            let last = &mut self.pieces[place.tail as usize];
            if last.start + last.length == start {
                last.length += items.len() as u32;
                return Ok(());
            }
        }
        let piece = self.pieces.len() as u32;
        self.budget.push(&mut self.pieces, Piece { start, length: items.len() as u32, next: NOWHERE })?;
        let head = if place.head == NOWHERE {
            piece
        } else {
            self.pieces[place.tail as usize].next = piece;
            place.head
        };
        self.nodes[node.0 as usize] = Node { head, tail: piece };
        Ok(())
    }

    pub(super) fn is_empty(&self, node: NodeId) -> bool {
        self.nodes[node.0 as usize].head == NOWHERE
    }

    /// Makes an empty dict stand for a record that was kept elsewhere.
    pub(super) fn set_record(&mut self, node: NodeId, record: u32) {
        self.nodes[node.0 as usize] = Node { head: RECORD, tail: record };
    }

    /// The record that a dict became.
    pub(in crate::trace::torch) fn record(&self, node: NodeId) -> Option<u32> {
        let node = self.nodes[node.0 as usize];
        (node.head == RECORD).then_some(node.tail)
    }

    /// The values of a container; for a dict, keys and values in turn. Nothing for a record.
    pub(in crate::trace::torch) fn items(&self, node: NodeId) -> impl Iterator<Item = Value> + '_ {
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
    pub(in crate::trace::torch) fn pairs(&self, node: NodeId) -> impl Iterator<Item = (Value, Value)> + '_ {
        let mut items = self.items(node);
        std::iter::from_fn(move || Some((items.next()?, items.next()?)))
    }

    /// The value under a key; the last one where a dict was given the key twice, as in Python.
    pub(in crate::trace::torch) fn get(&self, dict: NodeId, key: TextId) -> Option<Value> {
        self.pairs(dict).filter(|(found, _)| *found == Value::Text(key)).last().map(|(_, value)| value)
    }
}
