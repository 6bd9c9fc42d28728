//! What events refer to by number: tags, call sites, shapes of work, labels, stream handles.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use oomph_base::{SiteId, StreamId, TagId, ThreadId, Work};

/// A number in [`Tables::shapes`].
pub type ShapeId = u32;
/// A number in [`Tables::labels`].
pub type LabelId = u32;

/// What a block is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Not known.
    #[default]
    Unknown,
    /// Weights.
    Parameter,
    /// Gradients of weights.
    Gradient,
    /// Optimizer state.
    Optimizer,
    /// Saved for the backward pass.
    Activation,
    /// Gone by the end of the operation, or soon after.
    Temporary,
    /// Scratch memory of a library.
    Workspace,
    /// Input batches.
    Input,
}

impl Category {
    /// Every category, in the order in which reports show them.
    pub const ALL: [Category; 8] = [
        Category::Parameter,
        Category::Gradient,
        Category::Optimizer,
        Category::Activation,
        Category::Temporary,
        Category::Workspace,
        Category::Input,
        Category::Unknown,
    ];

    /// Its name in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Category::Unknown => "unknown",
            Category::Parameter => "parameter",
            Category::Gradient => "gradient",
            Category::Optimizer => "optimizer",
            Category::Activation => "activation",
            Category::Temporary => "temporary",
            Category::Workspace => "workspace",
            Category::Input => "input",
        }
    }
}

/// Category and layer of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Tag {
    /// What it is for.
    pub category: Category,
    /// Which layer it belongs to, if any.
    pub layer: Option<u16>,
}

/// The side tables of a trace. Entry 0 of tags, sites and labels is "none"; entry 0 of streams is
/// the default stream, entry 0 of threads the main thread.
///
/// Tables only grow: a reader may add entries while it reads, and numbers already given stay valid.
#[derive(Clone, Debug)]
pub struct Tables {
    tags: Interned<Tag>,
    sites: Interned<String>,
    labels: Interned<String>,
    shapes: Interned<Work>,
    streams: Interned<u64>,
    threads: Interned<u64>,
}

impl Default for Tables {
    fn default() -> Self {
        let mut tables = Tables {
            tags: Interned::default(),
            sites: Interned::default(),
            labels: Interned::default(),
            shapes: Interned::default(),
            streams: Interned::default(),
            threads: Interned::default(),
        };
        tables.tags.intern(Tag::default());
        tables.sites.intern(String::new());
        tables.labels.intern(String::new());
        tables.streams.intern(0);
        tables.threads.intern(0);
        tables
    }
}

impl Tables {
    /// The number of a tag.
    pub fn intern_tag(&mut self, tag: Tag) -> TagId {
        TagId(self.tags.intern(tag))
    }

    /// The number of a call site.
    pub fn intern_site(&mut self, site: &str) -> SiteId {
        SiteId(self.sites.intern_str(site))
    }

    /// The number of a label.
    pub fn intern_label(&mut self, label: &str) -> LabelId {
        self.labels.intern_str(label)
    }

    /// The number of a shape of work.
    pub fn intern_shape(&mut self, shape: Work) -> ShapeId {
        self.shapes.intern(shape)
    }

    /// The number of the stream that its program knew by this handle.
    pub fn intern_stream(&mut self, handle: u64) -> Result<StreamId, TableFull> {
        u16::try_from(self.streams.intern(handle)).map(StreamId).map_err(|_| TableFull("streams"))
    }

    /// The number of the thread that its program knew by this handle.
    pub fn intern_thread(&mut self, handle: u64) -> Result<ThreadId, TableFull> {
        u16::try_from(self.threads.intern(handle)).map(ThreadId).map_err(|_| TableFull("threads"))
    }

    /// Tags by number.
    #[must_use]
    pub fn tags(&self) -> &[Tag] {
        &self.tags.items
    }

    /// Call sites by number.
    #[must_use]
    pub fn sites(&self) -> &[String] {
        &self.sites.items
    }

    /// Labels by number.
    #[must_use]
    pub fn labels(&self) -> &[String] {
        &self.labels.items
    }

    /// Shapes of work by number.
    #[must_use]
    pub fn shapes(&self) -> &[Work] {
        &self.shapes.items
    }

    /// The handles that the traced program knew its streams by, by number.
    #[must_use]
    pub fn streams(&self) -> &[u64] {
        &self.streams.items
    }

    /// The handles that the traced program knew its threads by, by number.
    #[must_use]
    pub fn threads(&self) -> &[u64] {
        &self.threads.items
    }
}

/// A trace with more than 65,536 streams or threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("more than 65,536 {0} in one trace")]
pub struct TableFull(pub &'static str);

#[derive(Clone, Debug)]
struct Interned<T> {
    items: Vec<T>,
    numbers: HashMap<T, u32>,
}

impl<T> Default for Interned<T> {
    fn default() -> Self {
        Interned { items: Vec::new(), numbers: HashMap::new() }
    }
}

impl<T: Clone + Eq + std::hash::Hash> Interned<T> {
    fn intern(&mut self, item: T) -> u32 {
        if let Some(&number) = self.numbers.get(&item) {
            return number;
        }
        let number = self.items.len() as u32;
        self.items.push(item.clone());
        self.numbers.insert(item, number);
        number
    }
}

impl Interned<String> {
    /// Like `intern`, without making a `String` for a text that is known already.
    fn intern_str(&mut self, text: &str) -> u32 {
        match self.numbers.get(text) {
            Some(&number) => number,
            None => self.intern(text.to_owned()),
        }
    }
}
