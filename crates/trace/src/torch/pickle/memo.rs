//! What a pickle memorises, to refer to it again.

use std::{cmp::Ordering, collections::HashMap};

use super::{Budget, NodeId, Spent, TextId, Value};

/// What was memorised. Writers number densely; stray numbers go to the side, so that a huge one costs nothing.
#[derive(Default)]
pub(super) struct Memo {
    dense: Vec<Kept>,
    stray: HashMap<u32, Kept>,
    /// Numbers and the like, which no writer memorises.
    odd: Vec<Value>,
}

/// A memorised value in 8 bytes: there are several per trace entry.
#[derive(Clone, Copy)]
enum Kept {
    Text(TextId),
    List(NodeId),
    Tuple(NodeId),
    Dict(NodeId),
    Odd(u32),
}

impl Memo {
    pub(super) fn set(&mut self, index: u32, value: Value, budget: &mut Budget) -> Result<(), Spent> {
        let kept = match value {
            Value::Text(text) => Kept::Text(text),
            Value::List(node) => Kept::List(node),
            Value::Tuple(node) => Kept::Tuple(node),
            Value::Dict(node) => Kept::Dict(node),
            _ => {
                budget.push(&mut self.odd, value)?;
                Kept::Odd(self.odd.len() as u32 - 1)
            }
        };
        match (index as usize).cmp(&self.dense.len()) {
            Ordering::Less => self.dense[index as usize] = kept,
            Ordering::Equal => budget.push(&mut self.dense, kept)?,
            Ordering::Greater => {
                budget.charge(64)?;
                self.stray.insert(index, kept);
            }
        }
        Ok(())
    }

    pub(super) fn get(&self, index: u32) -> Option<Value> {
        let kept = self.dense.get(index as usize).or_else(|| self.stray.get(&index))?;
        Some(match *kept {
            Kept::Text(text) => Value::Text(text),
            Kept::List(node) => Value::List(node),
            Kept::Tuple(node) => Value::Tuple(node),
            Kept::Dict(node) => Value::Dict(node),
            Kept::Odd(place) => self.odd[place as usize],
        })
    }

    pub(super) fn len(&self) -> u32 {
        (self.dense.len() + self.stray.len()) as u32
    }
}
