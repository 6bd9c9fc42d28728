//! What PyTorch's own allocator would have reserved for the same requests.
//!
//! The requests of a program are kept in a log of fixed size. When the log is full, a thread replays
//! it through the model of PyTorch's allocator on a simulated GPU, while the program fills the next
//! log. So a request costs a few writes to memory, and a program of any length needs the memory of
//! two logs. The thread ends with its log: none exists while a log fills.

use std::{collections::HashMap, process, thread::JoinHandle};

use serde::Serialize;

use super::{ServiceError, ServiceSettings};
use oomph_alloc::device::{Device, DeviceProps, DeviceSpec, wrap::capped};
use oomph_alloc::strategy::{
    Attempt, Block, Caller, Context, Request, Setup, Silent, Strategy, StrategyError, StrategySpec,
};
use oomph_base::{Address, SiteId, StreamId, ThreadId};

/// Words in a log: 8 MiB, or 350,000 requests with their frees.
const LOG_WORDS: usize = 1 << 20;
/// The longest operation.
const LONGEST_OPERATION: usize = 2;

// An operation begins with an address, whose low byte is 0, and one of these words.
const ALLOC: u64 = 0;
const FREE: u64 = 1;
const USED_ON: u64 = 2;
const TRIM: u64 = 3;
const NEW_STREAM: u64 = 4;
const OPERATION: u64 = 0xff;
/// The second word of a request: its stream above, its size below.
const STREAM_SHIFT: u32 = 48;

const MODEL_FAILED: &str = "the model of PyTorch's allocator failed";

/// Compares the requests of a program on one GPU with PyTorch's own allocator.
pub(crate) struct Comparison {
    state: ComparisonState,
}

enum ComparisonState {
    /// It is not wanted.
    Off,
    /// It was given up, for this reason.
    Unknown(String),
    /// It goes on.
    Running(RunningComparison),
}

struct RunningComparison {
    log: Vec<u64>,
    /// `None` after a failure.
    model: Option<ModelPlace>,
    /// A forked process has the log, but not the thread.
    process: u32,
    /// Whether blocks were used on other streams. When such a block is reusable depends on time.
    depends_on_time: bool,
}

enum ModelPlace {
    Here(Box<NativeModel>),
    InThread(JoinHandle<Box<NativeModel>>),
}

/// What PyTorch's own allocator would have done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum NativeVerdict {
    /// It would have served all requests.
    Served {
        /// Its peak of reserved memory.
        peak_reserved: u64,
        /// Whether the program used blocks on several streams: then it depends on the speed of the
        /// streams, and this is the figure for fast ones, the least.
        depends_on_time: bool,
    },
    /// It would have failed to serve this many requests.
    RanOut {
        /// How many.
        requests: u64,
    },
    /// That is not known, for this reason.
    Unknown(String),
}

impl Comparison {
    /// A comparison on a GPU with these properties, of which this much memory is free.
    pub(crate) fn new(settings: &ServiceSettings, props: &DeviceProps, free: u64) -> Comparison {
        let Some(native) = &settings.native else { return Comparison { state: ComparisonState::Off } };
        let state = match NativeModel::new(native, settings.limit, props, free) {
            Ok(model) => ComparisonState::Running(RunningComparison {
                log: Vec::new(),
                model: Some(ModelPlace::Here(Box::new(model))),
                process: process::id(),
                depends_on_time: false,
            }),
            Err(error) => ComparisonState::Unknown(error.to_string()),
        };
        Comparison { state }
    }

    /// A stream that the program uses for the first time.
    pub(crate) fn new_stream(&mut self, handle: u64) {
        self.push(&[NEW_STREAM, handle]);
    }

    /// A request that was served.
    #[inline]
    pub(crate) fn alloc(&mut self, address: Address, bytes: u64, stream: StreamId) {
        self.push(&[address.0 | ALLOC, u64::from(stream.0) << STREAM_SHIFT | bytes]);
    }

    /// The free of a block.
    #[inline]
    pub(crate) fn free(&mut self, address: Address) {
        self.push(&[address.0 | FREE]);
    }

    /// A block was used on another stream.
    pub(crate) fn used_on(&mut self, address: Address, stream: StreamId) {
        if let ComparisonState::Running(running) = &mut self.state {
            running.depends_on_time = true;
        }
        self.push(&[address.0 | USED_ON, stream.0.into()]);
    }

    /// The program asked for cached memory to be released.
    pub(crate) fn trim(&mut self) {
        self.push(&[TRIM]);
    }

    /// The program did what the model does not follow.
    pub(crate) fn give_up(&mut self, reason: &str) {
        if let ComparisonState::Running(_) = self.state {
            self.state = ComparisonState::Unknown(reason.to_owned());
        }
    }

    /// The result so far; `None` if it is not wanted.
    pub(crate) fn verdict(&mut self) -> Option<NativeVerdict> {
        if let ComparisonState::Running(running) = &mut self.state {
            match running.finish() {
                Ok(verdict) => return Some(verdict),
                Err(reason) => self.give_up(&reason),
            }
        }
        match &self.state {
            ComparisonState::Unknown(reason) => Some(NativeVerdict::Unknown(reason.clone())),
            ComparisonState::Off | ComparisonState::Running(_) => None,
        }
    }

    #[inline]
    fn push(&mut self, words: &[u64]) {
        let ComparisonState::Running(running) = &mut self.state else { return };
        running.log.extend_from_slice(words);
        if running.log.len() + LONGEST_OPERATION > LOG_WORDS {
            self.hand_over();
        }
    }

    #[cold]
    fn hand_over(&mut self) {
        if let ComparisonState::Running(running) = &mut self.state
            && let Err(reason) = running.hand_over()
        {
            self.give_up(&reason);
        }
    }
}

impl RunningComparison {
    /// Gives the full log to a thread. One that still replays the log before is waited for: a program
    /// with real work takes far longer to fill a log than a thread to replay it.
    fn hand_over(&mut self) -> Result<(), String> {
        let log = std::mem::replace(&mut self.log, Vec::with_capacity(LOG_WORDS));
        self.with_model(|mut model| {
            let replay = move || {
                model.replay(&log);
                model
            };
            let thread = std::thread::Builder::new().name("oomph-compare".to_owned()).spawn(replay);
            thread.map(ModelPlace::InThread).map_err(|error| format!("no thread could be started: {error}"))
        })
    }

    fn finish(&mut self) -> Result<NativeVerdict, String> {
        let log = std::mem::take(&mut self.log);
        self.with_model(|mut model| {
            model.replay(&log);
            Ok(ModelPlace::Here(model))
        })?;
        let Some(ModelPlace::Here(model)) = &self.model else { return Err(MODEL_FAILED.to_owned()) };
        match (&model.error, model.failed) {
            (Some(error), _) => Err(error.clone()),
            (None, 0) => Ok(NativeVerdict::Served {
                peak_reserved: model.strategy.stats().peak.reserved,
                depends_on_time: self.depends_on_time,
            }),
            (None, requests) => Ok(NativeVerdict::RanOut { requests }),
        }
    }

    /// Takes the model out of its place, waiting for its thread, and puts it into another.
    fn with_model(&mut self, next: impl FnOnce(Box<NativeModel>) -> Result<ModelPlace, String>) -> Result<(), String> {
        if process::id() != self.process {
            return Err("the process was forked".to_owned());
        }
        let model = match self.model.take() {
            Some(ModelPlace::Here(model)) => Some(model),
            Some(ModelPlace::InThread(thread)) => thread.join().ok(),
            None => None,
        };
        self.model = Some(next(model.ok_or_else(|| MODEL_FAILED.to_owned())?)?);
        Ok(())
    }
}

/// PyTorch's allocator over a simulated GPU of the same size.
struct NativeModel {
    strategy: Box<dyn Strategy>,
    device: Box<dyn Device>,
    /// By the address that the program knows.
    blocks: HashMap<u64, Block>,
    /// Requests that it could not serve.
    failed: u64,
    error: Option<String>,
}

impl NativeModel {
    fn new(native: &str, limit: Option<u64>, props: &DeviceProps, free: u64) -> Result<NativeModel, ServiceError> {
        let spec: DeviceSpec = format!("sim:{}B", props.total_bytes).parse()?;
        let cap = limit.map_or(free, |limit| limit.min(free));
        let device = capped(spec.open()?, Some(cap));
        let strategy = StrategySpec::from(native).build(&Setup { props: device.props(), limit })?;
        Ok(NativeModel { strategy, device, blocks: HashMap::new(), failed: 0, error: None })
    }

    /// Replays a log. After an error the rest is not replayed.
    fn replay(&mut self, log: &[u64]) {
        let mut words = log.iter().copied();
        while self.error.is_none()
            && let Some(first) = words.next()
        {
            let address = first & !OPERATION;
            let done = match first & OPERATION {
                ALLOC => self.alloc(address, words.next().unwrap_or(0)),
                FREE => self.free(address),
                USED_ON => self.used_on(address, words.next().unwrap_or(0)),
                TRIM => self.call(|strategy, cx| strategy.trim(cx)),
                _ => {
                    let handle = words.next().unwrap_or(0);
                    self.call(|_, cx| cx.device.stream_create(handle).map(drop).map_err(StrategyError::from))
                }
            };
            self.error = done.err().map(|error| error.to_string());
        }
    }

    fn alloc(&mut self, address: u64, word: u64) -> Result<(), StrategyError> {
        let stream = StreamId((word >> STREAM_SHIFT) as u16);
        let bytes = word & ((1 << STREAM_SHIFT) - 1);
        let request = Request { bytes, stream, thread: ThreadId(0), site: SiteId(0) };
        match self.call(|strategy, cx| strategy.alloc(cx, &request))? {
            Attempt::Served(block, _) => {
                self.blocks.insert(address, block);
            }
            Attempt::OutOfMemory(_) => self.failed += 1,
        }
        Ok(())
    }

    fn free(&mut self, address: u64) -> Result<(), StrategyError> {
        match self.blocks.remove(&address) {
            Some(block) => self.call(|strategy, cx| strategy.free(cx, block, Caller::default())).map(drop),
            None => Ok(()),
        }
    }

    fn used_on(&mut self, address: u64, stream: u64) -> Result<(), StrategyError> {
        match self.blocks.get(&address).copied() {
            Some(block) => self.call(|strategy, cx| strategy.used_on(cx, &block, StreamId(stream as u16))),
            None => Ok(()),
        }
    }

    fn call<T>(
        &mut self,
        call: impl FnOnce(&mut dyn Strategy, &mut Context<'_>) -> Result<T, StrategyError>,
    ) -> Result<T, StrategyError> {
        call(&mut *self.strategy, &mut Context { device: &mut *self.device, sink: &mut Silent })
    }
}
