//! Numbers for values, in order of first appearance: streams, call sites, labels, stacks.

use std::{borrow::Borrow, collections::HashMap, hash::Hash, sync::Arc};

use oomph_base::FileText;

/// Every distinct value once, by number.
#[derive(Clone, Debug)]
pub(crate) struct Interner<T> {
    items: Vec<T>,
    numbers: HashMap<T, u32>,
    /// The number given last. Neighbouring events mostly agree, so it is tried first.
    last: u32,
}

impl<T> Default for Interner<T> {
    fn default() -> Self {
        Interner { items: Vec::new(), numbers: HashMap::new(), last: 0 }
    }
}

impl<T: Clone + Eq + Hash> Interner<T> {
    /// An interner in which `first` has number 0.
    pub(crate) fn starting_with(first: T) -> Interner<T> {
        let mut interner = Interner::default();
        interner.intern(&first);
        interner
    }

    /// The number of a value. A new value gets the next number.
    pub(crate) fn intern<Q>(&mut self, item: &Q) -> u32
    where
        T: Borrow<Q>,
        Q: ToOwned<Owned = T> + Eq + Hash + ?Sized,
    {
        self.intern_as(item, Q::to_owned)
    }

    /// Like [`intern`](Interner::intern), with another way to own a new value.
    fn intern_as<Q>(&mut self, item: &Q, owned: fn(&Q) -> T) -> u32
    where
        T: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        if self.items.get(self.last as usize).is_some_and(|last| last.borrow() == item) {
            return self.last;
        }
        self.last = match self.numbers.get(item) {
            Some(&number) => number,
            None => {
                let number = self.items.len() as u32;
                let value = owned(item);
                self.items.push(value.clone());
                self.numbers.insert(value, number);
                number
            }
        };
        self.last
    }

    /// The number of a known value.
    pub(crate) fn number(&self, item: &T) -> Option<u32> {
        self.numbers.get(item).copied()
    }

    /// All values, in the order of their numbers.
    pub(crate) fn items(&self) -> &[T] {
        &self.items
    }

    /// All values, without their index.
    pub(crate) fn into_items(self) -> Vec<T> {
        self.items
    }
}

/// Every distinct text once, by number. Number 0 is the empty text.
#[derive(Clone, Debug)]
pub(crate) struct TextInterner {
    numbers: Interner<Arc<str>>,
    items: Vec<FileText>,
}

impl Default for TextInterner {
    fn default() -> Self {
        let mut interner = TextInterner { numbers: Interner::default(), items: Vec::new() };
        interner.intern("");
        interner
    }
}

impl TextInterner {
    /// The number of a text. A new text gets the next number.
    pub(crate) fn intern(&mut self, text: &str) -> u32 {
        let number = self.numbers.intern_as(text, |text| text.into());
        self.items.extend(self.numbers.items()[self.items.len()..].iter().cloned().map(FileText::from));
        number
    }

    /// All texts, in the order of their numbers.
    pub(crate) fn items(&self) -> &[FileText] {
        &self.items
    }
}
