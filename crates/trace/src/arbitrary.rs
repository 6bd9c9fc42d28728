//! Random valid traces for property tests, in this room and in others.
//!
//! A trace is made from wishes ("free the third live block") that a builder makes come true as far as they make
//! sense. So every trace is valid, and proptest shrinks it by dropping wishes.

use proptest::{collection::vec, option, prelude::*, sample::Index};

use super::{BlockSlot, Category, CollectiveKind, MarkKind, Trace, TraceBuilder};
use oomph_base::{Dtype, Nanos, ProductRole, StreamId, ThreadId, Work};

/// A valid trace of up to `most` events, a few streams and threads, and odd texts.
pub fn traces(most: usize) -> impl Strategy<Value = Trace> {
    (".{0,8}", 0..4u16, vec(step(), 0..=most)).prop_map(|(name, extra_streams, steps)| {
        let mut author = Author::new(extra_streams);
        for step in steps {
            author.fulfil(step);
        }
        author.story.finish(&name)
    })
}

/// A wish, the time before it, and the thread that has it.
#[derive(Clone, Debug)]
struct Step {
    wish: Wish,
    elapsed: u64,
    thread: u16,
}

#[derive(Clone, Debug)]
enum Wish {
    Alloc { bytes: u64, stream: Index, category: Category, layer: Option<u16>, site: String },
    HostAlloc { bytes: u64 },
    Free { block: Index, elsewhere: Option<Index> },
    Use { block: Index, stream: Index },
    Work { work: Work, stream: Index, operands: Vec<Index> },
    Record { event: u8, stream: Index },
    Wait { event: Index, stream: Index },
    StreamSync { stream: Index },
    DeviceSync,
    EmptyCache,
    Mark { kind: MarkKind, label: String, index: u32 },
    Collective { kind: CollectiveKind, bytes: u64, ranks: u16, stream: Index },
}

fn step() -> impl Strategy<Value = Step> {
    let elapsed =
        prop_oneof![4 => Just(0), 4 => 0..100_000u64, 1 => any::<u32>().prop_map(u64::from), 1 => any::<u64>()];
    (wish(), elapsed, prop_oneof![3 => Just(0), 1 => 0..4u16]).prop_map(|(wish, elapsed, thread)| Step {
        wish,
        elapsed,
        thread,
    })
}

fn wish() -> impl Strategy<Value = Wish> {
    let (index, bytes) = (any::<Index>, || prop_oneof![9 => 1..1u64 << 30, 1 => 1..=u64::MAX]);
    let alloc = (bytes(), index(), category(), option::of(any::<u16>()), text())
        .prop_map(|(bytes, stream, category, layer, site)| Wish::Alloc { bytes, stream, category, layer, site });
    let free = (index(), option::weighted(0.1, index())).prop_map(|(block, elsewhere)| Wish::Free { block, elsewhere });
    let work = (work(), index(), vec(index(), 0..=4)).prop_map(|(work, stream, operands)| Wish::Work {
        work,
        stream,
        operands,
    });
    let mark = (proptest::sample::select(&MarkKind::ALL[..]), text(), any::<u32>())
        .prop_map(|(kind, label, index)| Wish::Mark { kind, label, index });
    let collective = (proptest::sample::select(&CollectiveKind::ALL[..]), any::<u64>(), any::<u16>(), index())
        .prop_map(|(kind, bytes, ranks, stream)| Wish::Collective { kind, bytes, ranks, stream });
    prop_oneof![
        8 => alloc,
        6 => free,
        1 => bytes().prop_map(|bytes| Wish::HostAlloc { bytes }),
        1 => (index(), index()).prop_map(|(block, stream)| Wish::Use { block, stream }),
        1 => work,
        1 => (0..4u8, index()).prop_map(|(event, stream)| Wish::Record { event, stream }),
        1 => (index(), index()).prop_map(|(event, stream)| Wish::Wait { event, stream }),
        1 => mark,
        1 => collective,
        1 => index().prop_map(|stream| Wish::StreamSync { stream }),
        1 => Just(Wish::DeviceSync),
        1 => Just(Wish::EmptyCache),
    ]
}

fn category() -> impl Strategy<Value = Category> {
    proptest::sample::select(&Category::ALL[..])
}

/// Mostly plain, sometimes anything that is text.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![4 => "[a-c]{0,2}", 1 => any::<String>(), 1 => Just("\"quoted\"\n# two\\lines".to_owned())]
}

fn work() -> impl Strategy<Value = Work> {
    prop_oneof![
        any::<u64>().prop_map(|nanos| Work::Spin { nanos: Nanos(nanos) }),
        any::<u64>().prop_map(|bytes| Work::Elementwise { bytes }),
        (any::<u64>(), any::<bool>()).prop_map(|(bytes, pinned)| Work::CopyIn { bytes, pinned }),
        (any::<[u32; 4]>()).prop_map(|[m, n, k, batch]| Work::Gemm {
            m,
            n,
            k,
            batch,
            dtype: Dtype::Bf16,
            role: ProductRole::ALL[m as usize % ProductRole::ALL.len()],
        }),
    ]
}

/// Makes wishes come true.
struct Author {
    story: TraceBuilder,
    streams: Vec<StreamId>,
    device: Vec<BlockSlot>,
    host: Vec<BlockSlot>,
    recorded: Vec<u8>,
}

impl Author {
    fn new(extra_streams: u16) -> Author {
        let mut story = TraceBuilder::new();
        let mut streams = vec![StreamId::DEFAULT];
        streams.extend((0..extra_streams).filter_map(|_| story.new_stream().ok()));
        Author { story, streams, device: Vec::new(), host: Vec::new(), recorded: Vec::new() }
    }

    fn fulfil(&mut self, step: Step) {
        self.story.set_thread(ThreadId(step.thread));
        self.story.elapse(Nanos(step.elapsed));
        match step.wish {
            Wish::Alloc { bytes, stream, category, layer, site } => {
                let (tag, site) = (self.story.tag(category, layer), self.story.site(&site));
                let slot = self.story.alloc_at(bytes, *stream.get(&self.streams), tag, site);
                self.device.push(slot);
            }
            Wish::HostAlloc { bytes } => self.host.push(self.story.host_alloc(bytes)),
            Wish::Free { block, elsewhere } => self.free(block, elsewhere),
            Wish::Use { block, stream } if !self.device.is_empty() => {
                self.story.use_on(*block.get(&self.device), *stream.get(&self.streams));
            }
            Wish::Work { work, stream, operands } => {
                let live: Vec<_> = self.device.iter().chain(&self.host).copied().collect();
                let operands: Vec<_> =
                    operands.iter().filter(|_| !live.is_empty()).map(|operand| *operand.get(&live)).collect();
                self.story.work(work, *stream.get(&self.streams), &operands);
            }
            Wish::Record { event, stream } => {
                self.recorded.push(event);
                self.story.event_record(event.into(), *stream.get(&self.streams));
            }
            Wish::Wait { event, stream } if !self.recorded.is_empty() => {
                self.story.event_wait((*event.get(&self.recorded)).into(), *stream.get(&self.streams));
            }
            Wish::Use { .. } | Wish::Wait { .. } | Wish::DeviceSync => self.story.device_sync(),
            Wish::StreamSync { stream } => self.story.stream_sync(*stream.get(&self.streams)),
            Wish::EmptyCache => self.story.empty_cache(),
            Wish::Mark { kind, label, index } => self.story.mark(kind, &label, index),
            Wish::Collective { kind, bytes, ranks, stream } => {
                self.story.collective(kind, bytes, ranks, *stream.get(&self.streams));
            }
        }
    }

    fn free(&mut self, block: Index, elsewhere: Option<Index>) {
        let live = self.device.len() + self.host.len();
        if live == 0 {
            return;
        }
        let place = block.index(live);
        if place >= self.device.len() {
            let slot = self.host.swap_remove(place - self.device.len());
            self.story.host_free(slot);
            return;
        }
        let slot = self.device.swap_remove(place);
        match elsewhere {
            Some(stream) => self.story.free_on(slot, *stream.get(&self.streams)),
            None => self.story.free(slot),
        }
    }
}
