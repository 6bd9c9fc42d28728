//! Random valid traces for property tests, in this crate and in others.
//!
//! A trace is made of steps such as "free the third live block". A step that does not apply becomes another one, so every
//! trace is valid, and proptest shrinks it by removing steps.

use std::collections::HashSet;

use proptest::{collection::vec, option, prelude::*, sample::Index};

use super::{BlockSlot, Category, CollectiveKind, MarkKind, OpKind, Trace, TraceBuilder};
use oomph_base::{Dtype, Nanos, ProductRole, StreamId, ThreadId, Work};

/// A valid trace of up to `most` events, a few streams and threads, and unusual texts.
pub fn traces(most: usize) -> impl Strategy<Value = Trace> {
    (".{0,8}", 0..4u16, vec(steps(), 0..=most)).prop_map(|(name, extra_streams, steps)| {
        let mut author = TraceAuthor::new(extra_streams);
        for step in steps {
            author.take(&step);
        }
        author.builder.finish(&name)
    })
}

/// One event, with values for every kind of event.
#[derive(Clone, Debug)]
struct RandomStep {
    kind: OpKind,
    bytes: u64,
    /// Blocks, streams and table entries.
    choices: [Index; 4],
    /// How many blocks the work uses.
    operands: usize,
    other_stream: bool,
    layer: Option<u16>,
    text: String,
    number: u32,
    work: Work,
    elapsed: u64,
    thread: u16,
}

fn steps() -> impl Strategy<Value = RandomStep> {
    let kinds = prop_oneof![
        8 => Just(OpKind::Alloc),
        6 => Just(OpKind::Free),
        10 => proptest::sample::select(&OpKind::ALL[2..]),
    ];
    let bytes = prop_oneof![9 => 1..1u64 << 30, 1 => 1..=u64::MAX];
    let text = prop_oneof![4 => "[a-c]{0,2}", 1 => any::<String>(), 1 => Just("\"quoted\"\n# two\\lines".to_owned())];
    let elapsed =
        prop_oneof![4 => Just(0), 4 => 0..100_000u64, 1 => any::<u32>().prop_map(u64::from), 1 => any::<u64>()];
    let numbers = (bytes, any::<u32>(), elapsed, prop_oneof![3 => Just(0), 1 => 0..4u16]);
    let rest = (0..=4usize, proptest::bool::weighted(0.1), option::of(any::<u16>()), text, work());
    (kinds, any::<[Index; 4]>(), numbers, rest).prop_map(|(kind, choices, numbers, rest)| {
        let (bytes, number, elapsed, thread) = numbers;
        let (operands, other_stream, layer, text, work) = rest;
        RandomStep { kind, bytes, choices, operands, other_stream, layer, text, number, work, elapsed, thread }
    })
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

/// Turns steps into events.
struct TraceAuthor {
    builder: TraceBuilder,
    streams: Vec<StreamId>,
    device: Vec<BlockSlot>,
    host: Vec<BlockSlot>,
    recorded: Vec<u32>,
    /// Released pools.
    released: HashSet<(u64, u64)>,
}

impl TraceAuthor {
    fn new(extra_streams: u16) -> TraceAuthor {
        let mut builder = TraceBuilder::new();
        let mut streams = vec![StreamId::DEFAULT];
        streams.extend((0..extra_streams).filter_map(|_| builder.new_stream().ok()));
        TraceAuthor {
            builder,
            streams,
            device: Vec::new(),
            host: Vec::new(),
            recorded: Vec::new(),
            released: HashSet::new(),
        }
    }

    fn take(&mut self, step: &RandomStep) {
        let [first, second, ..] = step.choices;
        let stream = *first.get(&self.streams);
        let builder = &mut self.builder;
        builder.set_thread(ThreadId(step.thread));
        builder.elapse(Nanos(step.elapsed));
        match step.kind {
            OpKind::Alloc => {
                let tag = builder.tag(*second.get(&Category::ALL), step.layer);
                let site = builder.site(&step.text);
                self.device.push(builder.alloc_at(step.bytes, stream, tag, site));
            }
            OpKind::Free if !self.device.is_empty() => {
                let slot = self.device.swap_remove(second.index(self.device.len()));
                match step.other_stream {
                    true => builder.free_on(slot, stream),
                    false => builder.free(slot),
                }
            }
            OpKind::HostAlloc => self.host.push(builder.host_alloc(step.bytes)),
            OpKind::HostFree if !self.host.is_empty() => {
                builder.host_free(self.host.swap_remove(second.index(self.host.len())));
            }
            OpKind::Use if !self.device.is_empty() => builder.use_on(*second.get(&self.device), stream),
            OpKind::Work => {
                let live: Vec<_> = self.device.iter().chain(&self.host).copied().collect();
                let count = if live.is_empty() { 0 } else { step.operands };
                let operands: Vec<_> = step.choices[..count].iter().map(|choice| *choice.get(&live)).collect();
                builder.work(step.work, stream, &operands);
            }
            OpKind::EventRecord => {
                self.recorded.push(step.number % 4);
                builder.event_record(step.number % 4, stream);
            }
            OpKind::EventWait if !self.recorded.is_empty() => {
                builder.event_wait(*second.get(&self.recorded), stream);
            }
            OpKind::StreamSync => builder.stream_sync(stream),
            OpKind::EmptyCache => builder.empty_cache(),
            OpKind::UsePool => {
                let pool = (0, u64::from(step.number % 3));
                builder.use_pool(if self.released.contains(&pool) { (0, 0) } else { pool });
            }
            OpKind::ReleasePool => {
                let pool = (0, 1 + u64::from(step.number % 2));
                if self.released.insert(pool) {
                    builder.release_pool(pool, step.other_stream);
                }
            }
            OpKind::Mark => builder.mark(*second.get(&MarkKind::ALL), &step.text, step.number),
            OpKind::Collective => {
                builder.collective(*second.get(&CollectiveKind::ALL), step.bytes, step.number as u16, stream);
            }
            // Steps that do not apply.
            OpKind::Free | OpKind::HostFree | OpKind::Use | OpKind::EventWait | OpKind::DeviceSync | OpKind::Idle => {
                builder.device_sync()
            }
        }
    }
}
