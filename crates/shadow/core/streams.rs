//! Streams and events on a clock that only calls move.
//!
//! The host's time grows by a fixed cost per call; work that is queued on a stream ends at a later time; waiting moves
//! the host. So an event is "not ready" for as long as its work takes, and two runs of a program see the same answers.
//! Streams wait for each other only through events: PyTorch's streams are non-blocking.

use std::{collections::HashMap, sync::Mutex};

use crate::{
    arguments::Out,
    capture,
    errors::{CAPTURE_ISOLATION, CAPTURE_UNSUPPORTED, INVALID_VALUE, NOT_READY, SUCCESS, conclude},
    served,
    served_call::ServedCall,
    state::{self, Shadow},
};

/// The stream of each handle of cuBLAS and cuDNN, where one was set.
static LIBRARY_STREAMS: Mutex<Option<HashMap<u64, u64>>> = Mutex::new(None);

/// The stream of a library's handle.
pub fn of_library(handle: u64) -> u64 {
    let streams = state::locked(&LIBRARY_STREAMS);
    streams.as_ref().and_then(|streams| streams.get(&handle).copied()).unwrap_or(0)
}

/// Sets the stream of a library's handle.
pub fn set_library_stream(handle: u64, stream: u64) {
    let mut streams = state::locked(&LIBRARY_STREAMS);
    streams.get_or_insert_default().insert(handle, stream);
}

/// Host time of an ordinary call.
pub const CALL_NANOS: u64 = 1_000;
/// Host time per kernel launch: the median time between two launches of an eager PyTorch program whose device never
/// keeps it waiting, Python included (`swiglu` on an H200: 26,145 entries of its recording).
pub const LAUNCH_NANOS: u64 = 10_000;
/// `cudaMalloc` and `cuMemCreate` of small sizes on an H200.
pub const MALLOC_NANOS: u64 = 50_000;
/// `cudaHostAlloc`, the part that does not depend on the size.
pub const HOST_ALLOC_NANOS: u64 = 20_000;
/// The shortest kernel on an H200 (`kernel_floor_ns` of the simulated device's profile).
pub const KERNEL_FLOOR_NANOS: u64 = 3_600;

/// Made-up stream handles start here, a fixed step apart. 0, 1 and 2 are CUDA's default streams.
const FIRST_STREAM: u64 = 0x1000_0000;
const STREAM_STEP: u64 = 0x100;
const FIRST_EVENT: u64 = 0x2000_0000;

/// Host time, streams and events.
pub struct Clocks {
    now: u64,
    /// When the work of a stream that was queued so far is done.
    streams: HashMap<u64, StreamClock>,
    /// When the work in front of an event is done.
    events: HashMap<u64, EventClock>,
    created_streams: u64,
    created_events: u64,
}

#[derive(Clone, Copy, Default)]
struct StreamClock {
    ready: u64,
    priority: i32,
}

#[derive(Clone, Copy, Default)]
pub struct EventClock {
    pub done: u64,
    /// The capture in which it was recorded, 0 for none.
    pub capture: u64,
}

impl Clocks {
    pub fn new() -> Clocks {
        Clocks { now: 0, streams: HashMap::new(), events: HashMap::new(), created_streams: 0, created_events: 0 }
    }

    pub fn now(&self) -> u64 {
        self.now
    }

    pub fn elapse(&mut self, nanos: u64) {
        self.now += nanos;
    }

    pub fn ready(&self, stream: u64) -> u64 {
        self.streams.get(&stream).map_or(0, |clock| clock.ready)
    }

    /// Queues work.
    pub fn run(&mut self, stream: u64, nanos: u64) {
        let now = self.now;
        let clock = self.streams.entry(stream).or_default();
        clock.ready = clock.ready.max(now) + nanos;
    }

    /// Later work of a stream starts at `moment` at the earliest.
    pub fn hold(&mut self, stream: u64, moment: u64) {
        let clock = self.streams.entry(stream).or_default();
        clock.ready = clock.ready.max(moment);
    }

    pub fn synchronize(&mut self, stream: u64) {
        self.now = self.now.max(self.ready(stream)) + CALL_NANOS;
    }

    pub fn synchronize_all(&mut self) {
        let last = self.streams.values().map(|clock| clock.ready).max().unwrap_or(0);
        self.now = self.now.max(last) + CALL_NANOS;
    }

    fn create_stream(&mut self, priority: i32) -> u64 {
        self.created_streams += 1;
        let handle = FIRST_STREAM + self.created_streams * STREAM_STEP;
        self.streams.insert(handle, StreamClock { ready: 0, priority });
        handle
    }

    fn create_event(&mut self) -> u64 {
        self.created_events += 1;
        let handle = FIRST_EVENT + self.created_events * 0x40;
        self.events.insert(handle, EventClock::default());
        handle
    }

    pub fn event(&self, event: u64) -> Option<EventClock> {
        self.events.get(&event).copied()
    }
}

impl Shadow {
    fn record(&mut self, event: u64, stream: u64) -> i32 {
        self.clocks.elapse(CALL_NANOS);
        let capture = self.captures.of_stream(stream);
        let done = self.clocks.ready(stream);
        self.clocks.events.insert(event, EventClock { done, capture });
        SUCCESS
    }

    fn wait_event(&mut self, stream: u64, event: u64) -> i32 {
        self.clocks.elapse(CALL_NANOS);
        let Some(clock) = self.clocks.event(event) else { return INVALID_VALUE };
        let capture = self.captures.of_stream(stream);
        if capture != 0 && clock.capture != capture && clock.done > 0 {
            self.captures.spoil(capture);
            return CAPTURE_ISOLATION;
        }
        self.clocks.hold(stream, clock.done);
        if clock.capture != 0 {
            self.captures.join(stream, clock.capture);
        }
        SUCCESS
    }
}

fn record(event: u64, stream: u64) -> i32 {
    served::code(ServedCall::EventRecord, [event, stream, 0]).unwrap_or_else(|| state::lock().record(event, stream))
}

fn wait_event(stream: u64, event: u64) -> i32 {
    let served = served::code(ServedCall::StreamWaitEvent, [stream, event, 0]);
    served.unwrap_or_else(|| state::lock().wait_event(stream, event))
}

/// Whether something is done, as a code.
fn readiness(served: Result<u64, i32>) -> i32 {
    match served {
        Ok(0) => NOT_READY,
        Ok(_) => SUCCESS,
        Err(code) => code,
    }
}

fn stream_synchronize(stream: u64) -> i32 {
    if let Some(code) = served::code(ServedCall::StreamSynchronize, [stream, 0, 0]) {
        return code;
    }
    let mut shadow = state::lock();
    let capture = shadow.captures.of_stream(stream);
    if capture != 0 {
        shadow.captures.spoil(capture);
        return CAPTURE_UNSUPPORTED;
    }
    shadow.clocks.synchronize(stream);
    shadow.release_above_thresholds();
    SUCCESS
}

fn device_synchronize() -> i32 {
    if let Some(code) = served::code(ServedCall::CtxSynchronize, [0; 3]) {
        return code;
    }
    let mut shadow = state::lock();
    if shadow.captures.any_active() {
        return CAPTURE_UNSUPPORTED;
    }
    shadow.clocks.synchronize_all();
    shadow.release_above_thresholds();
    SUCCESS
}

fn stream_query(stream: u64) -> i32 {
    if let Some(ready) = served::value(ServedCall::StreamQuery, [stream, 0, 0]) {
        return readiness(ready);
    }
    let mut shadow = state::lock();
    shadow.clocks.elapse(CALL_NANOS);
    if shadow.clocks.ready(stream) > shadow.clocks.now() { NOT_READY } else { SUCCESS }
}

fn event_query(event: u64) -> i32 {
    if let Some(code) = capture::refused() {
        return code;
    }
    if let Some(ready) = served::value(ServedCall::EventQuery, [event, 0, 0]) {
        return readiness(ready);
    }
    let mut shadow = state::lock();
    shadow.clocks.elapse(CALL_NANOS);
    match shadow.clocks.event(event) {
        Some(clock) if clock.capture != 0 && shadow.captures.is_active(clock.capture) => CAPTURE_UNSUPPORTED,
        Some(clock) if clock.done > shadow.clocks.now() => NOT_READY,
        Some(_) => SUCCESS,
        None => INVALID_VALUE,
    }
}

fn event_synchronize(event: u64) -> i32 {
    if let Some(code) = capture::refused() {
        return code;
    }
    if let Some(code) = served::code(ServedCall::EventSynchronize, [event, 0, 0]) {
        return code;
    }
    let mut shadow = state::lock();
    let Some(clock) = shadow.clocks.event(event) else { return INVALID_VALUE };
    shadow.clocks.now = shadow.clocks.now.max(clock.done) + CALL_NANOS;
    shadow.release_above_thresholds();
    SUCCESS
}

fn elapsed(milliseconds: Out<f32>, start: u64, end: u64) -> i32 {
    if let Some(ready) = served::value(ServedCall::EventQuery, [end, 0, 0]) {
        milliseconds.set(1e-3);
        return readiness(ready);
    }
    let mut shadow = state::lock();
    let (Some(start), Some(end)) = (shadow.clocks.event(start), shadow.clocks.event(end)) else {
        milliseconds.set(0.0);
        return INVALID_VALUE;
    };
    shadow.clocks.elapse(CALL_NANOS);
    // Never 0: programs divide by it.
    milliseconds.set(((end.done as f64 - start.done as f64) / 1e6).max(1e-3) as f32);
    if end.done > shadow.clocks.now() { NOT_READY } else { SUCCESS }
}

fn create_stream(stream: Out<u64>, priority: i32) -> i32 {
    if let Some(made) = served::value(ServedCall::StreamCreate, [0; 3]) {
        return made.map_or_else(
            |code| code,
            |made| {
                stream.set(made);
                SUCCESS
            },
        );
    }
    stream.set(state::lock().clocks.create_stream(priority));
    SUCCESS
}

fn create_event(event: Out<u64>) -> i32 {
    if let Some(made) = served::value(ServedCall::EventCreate, [0; 3]) {
        return made.map_or_else(
            |code| code,
            |made| {
                event.set(made);
                SUCCESS
            },
        );
    }
    event.set(state::lock().clocks.create_event());
    SUCCESS
}

fn destroy_event(event: u64) -> i32 {
    if let Some(code) = served::code(ServedCall::EventDestroy, [event, 0, 0]) {
        return code;
    }
    state::lock().clocks.events.remove(&event).map_or(INVALID_VALUE, |_| SUCCESS)
}

fn destroy_stream(stream: u64) -> i32 {
    state::lock().clocks.streams.remove(&stream);
    SUCCESS
}

fn priority_of(stream: u64, priority: Out<i32>) -> i32 {
    priority.set(state::lock().clocks.streams.get(&stream).map_or(0, |clock| clock.priority));
    SUCCESS
}

/// Greatest priorities of an H200.
fn priority_range(least: Out<i32>, greatest: Out<i32>) -> i32 {
    least.set(0);
    greatest.set(-5);
    SUCCESS
}

cuda_functions! {
    fn cudaStreamCreate(stream: Out<u64>) -> i32 { create_stream(stream, 0) }
    fn cudaStreamCreateWithFlags(stream: Out<u64>, _flags: u32) -> i32 { create_stream(stream, 0) }
    fn cudaStreamCreateWithPriority(stream: Out<u64>, _flags: u32, priority: i32) -> i32 { create_stream(stream, priority) }
    fn cudaStreamDestroy(stream: u64) -> i32 { destroy_stream(stream) }
    fn cudaStreamGetPriority(stream: u64, priority: Out<i32>) -> i32 { priority_of(stream, priority) }
    fn cudaStreamGetFlags(_stream: u64, flags: Out<u32>) -> i32 { flags.set(1); SUCCESS }
    fn cudaStreamGetId(stream: u64, id: Out<u64>) -> i32 { id.set(stream); SUCCESS }
    fn cudaDeviceGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) -> i32 { priority_range(least, greatest) }
    fn cudaStreamSynchronize(stream: u64) -> i32 { conclude(stream_synchronize(stream)) }
    fn cudaDeviceSynchronize() -> i32 { conclude(device_synchronize()) }
    fn cudaStreamQuery(stream: u64) -> i32 { conclude(stream_query(stream)) }
    fn cudaStreamWaitEvent(stream: u64, event: u64, _flags: u32) -> i32 { conclude(wait_event(stream, event)) }
    fn cudaEventCreate(event: Out<u64>) -> i32 { create_event(event) }
    fn cudaEventCreateWithFlags(event: Out<u64>, _flags: u32) -> i32 { create_event(event) }
    fn cudaEventDestroy(event: u64) -> i32 { conclude(destroy_event(event)) }
    fn cudaEventRecord(event: u64, stream: u64) -> i32 { conclude(record(event, stream)) }
    fn cudaEventRecordWithFlags(event: u64, stream: u64, _flags: u32) -> i32 { conclude(record(event, stream)) }
    fn cudaEventQuery(event: u64) -> i32 { conclude(event_query(event)) }
    fn cudaEventSynchronize(event: u64) -> i32 { conclude(event_synchronize(event)) }
    fn cudaEventElapsedTime(milliseconds: Out<f32>, start: u64, end: u64) -> i32 { conclude(elapsed(milliseconds, start, end)) }
    fn cudaEventElapsedTime_v2(milliseconds: Out<f32>, start: u64, end: u64) -> i32 { conclude(elapsed(milliseconds, start, end)) }
    fn cuStreamCreate(stream: Out<u64>, _flags: u32) -> i32 { create_stream(stream, 0) }
    fn cuStreamCreateWithPriority(stream: Out<u64>, _flags: u32, priority: i32) -> i32 { create_stream(stream, priority) }
    fn cuStreamDestroy_v2(stream: u64) -> i32 { destroy_stream(stream) }
    fn cuStreamGetPriority(stream: u64, priority: Out<i32>) -> i32 { priority_of(stream, priority) }
    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) -> i32 { priority_range(least, greatest) }
    fn cuStreamSynchronize(stream: u64) -> i32 { stream_synchronize(stream) }
    fn cuCtxSynchronize() -> i32 { device_synchronize() }
    fn cuStreamQuery(stream: u64) -> i32 { stream_query(stream) }
    fn cuStreamWaitEvent(stream: u64, event: u64, _flags: u32) -> i32 { wait_event(stream, event) }
    fn cuEventCreate(event: Out<u64>, _flags: u32) -> i32 { create_event(event) }
    fn cuEventDestroy_v2(event: u64) -> i32 { destroy_event(event) }
    fn cuEventRecord(event: u64, stream: u64) -> i32 { record(event, stream) }
    fn cuEventRecordWithFlags(event: u64, stream: u64, _flags: u32) -> i32 { record(event, stream) }
    fn cuEventQuery(event: u64) -> i32 { event_query(event) }
    fn cuEventSynchronize(event: u64) -> i32 { event_synchronize(event) }
    fn cuEventElapsedTime(milliseconds: Out<f32>, start: u64, end: u64) -> i32 { elapsed(milliseconds, start, end) }
    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: u64, end: u64) -> i32 { elapsed(milliseconds, start, end) }
    // Functions of the host run at once: all work in front of them takes no real time.
    fn cudaLaunchHostFunc(_stream: u64, function: extern "C" fn(u64), data: u64) -> i32 { capture::run_or_skip(_stream, || function(data)) }
    fn cudaStreamAddCallback(stream: u64, function: extern "C" fn(u64, i32, u64), data: u64, _flags: u32) -> i32 { function(stream, SUCCESS, data); SUCCESS }
    fn cuLaunchHostFunc(_stream: u64, function: extern "C" fn(u64), data: u64) -> i32 { capture::run_or_skip(_stream, || function(data)) }
    fn cuStreamAddCallback(stream: u64, function: extern "C" fn(u64, i32, u64), data: u64, _flags: u32) -> i32 { function(stream, SUCCESS, data); SUCCESS }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_ready_when_the_host_reaches_its_time() {
        let mut clocks = Clocks::new();
        let stream = clocks.create_stream(0);
        clocks.run(stream, 500_000);
        assert_eq!((clocks.now(), clocks.ready(stream)), (0, 500_000));
        clocks.elapse(100);
        clocks.run(stream, 1_000);
        assert_eq!(clocks.ready(stream), 501_000, "work is queued behind work");
        clocks.synchronize(stream);
        assert_eq!(clocks.now(), 501_000 + CALL_NANOS);
        clocks.run(stream, 10);
        assert_eq!(clocks.ready(stream), clocks.now() + 10, "an idle stream starts at once");
    }

    #[test]
    fn streams_wait_for_events() {
        let mut shadow = state::lock();
        let (first, second) = (shadow.clocks.create_stream(0), shadow.clocks.create_stream(0));
        let event = shadow.clocks.create_event();
        shadow.clocks.run(first, 1 << 30);
        shadow.record(event, first);
        shadow.wait_event(second, event);
        assert_eq!(shadow.clocks.ready(second), shadow.clocks.ready(first));
        drop(shadow);
        assert_eq!(event_query(event), NOT_READY);
        assert_eq!((event_synchronize(event), event_query(event)), (SUCCESS, SUCCESS));
        assert_eq!((destroy_event(event), event_query(event)), (SUCCESS, INVALID_VALUE));
    }
}
