//! Capture of streams into graphs, and graphs.
//!
//! A capture belongs to the streams that take part: the one it began on and those that wait for an event recorded in it.
//! A graph keeps how many nodes it has, how long its work takes and where it writes.
//!
//! Calls that CUDA forbids during a capture fail and spoil it. Which calls are forbidden depends on the mode of the
//! capture and on that of the calling thread ([`refused`]).

use std::{
    cell::Cell,
    collections::{BTreeMap, HashMap},
    thread::{self, ThreadId},
};

use crate::{
    arguments::{Out, new_handle},
    errors::{CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, INVALID_VALUE, SUCCESS},
    state, streams,
};

/// `cudaStreamCaptureStatusActive`.
const ACTIVE: i32 = 1;
/// `cudaStreamCaptureStatusInvalidated`.
const SPOILED: i32 = 2;

/// `cudaStreamCaptureModeGlobal`: while such a capture is under way, no thread may make unsafe calls.
const GLOBAL: i32 = 0;
/// `cudaStreamCaptureModeRelaxed`: the thread may make unsafe calls.
const RELAXED: i32 = 2;

thread_local! {
    /// The mode of the thread.
    static MODE: Cell<i32> = const { Cell::new(GLOBAL) };
}

/// Active captures and finished graphs.
#[derive(Default)]
pub struct Captures {
    last_id: u64,
    /// The capture of each stream.
    by_stream: HashMap<u64, u64>,
    /// Work of active captures so far.
    active: HashMap<u64, GraphWork>,
    graphs: HashMap<u64, GraphWork>,
}

/// What a graph does.
#[derive(Clone, Default)]
struct GraphWork {
    nodes: u64,
    nanos: u64,
    /// Addresses that its nodes may write: what is known there is forgotten by each launch.
    writes: BTreeMap<u64, u64>,
    /// The graph that the capture fills.
    graph: u64,
    /// The mode of the capture.
    mode: i32,
    /// The thread that began it.
    thread: Option<ThreadId>,
    /// A forbidden call was made.
    spoiled: bool,
}

impl Captures {
    fn begin(&mut self, stream: u64, mode: i32) -> Option<u64> {
        if self.by_stream.contains_key(&stream) {
            return None;
        }
        self.last_id += 1;
        self.by_stream.insert(stream, self.last_id);
        let thread = Some(thread::current().id());
        self.active.insert(self.last_id, GraphWork { graph: new_handle(0), mode, thread, ..GraphWork::default() });
        Some(self.last_id)
    }

    fn end(&mut self, stream: u64) -> Result<u64, i32> {
        let id = self.by_stream.get(&stream).copied().ok_or(INVALID_VALUE)?;
        self.by_stream.retain(|_, of| *of != id);
        let work = self.active.remove(&id).ok_or(INVALID_VALUE)?;
        if work.spoiled {
            return Err(CAPTURE_INVALIDATED);
        }
        let graph = work.graph;
        self.graphs.insert(graph, work);
        Ok(graph)
    }

    /// A thread of this mode makes an unsafe call. Returns whether a capture forbids it, which then is spoiled.
    fn forbids(&mut self, thread: ThreadId, mode: i32) -> bool {
        let mut forbids = false;
        for work in self.active.values_mut().filter(|_| mode != RELAXED) {
            let own = work.thread == Some(thread) && work.mode != RELAXED;
            if own || (mode == GLOBAL && work.mode == GLOBAL) {
                work.spoiled = true;
                forbids = true;
            }
        }
        forbids
    }

    /// A call that no mode allows was made in a capture.
    pub fn spoil(&mut self, id: u64) {
        if let Some(work) = self.active.get_mut(&id) {
            work.spoiled = true;
        }
    }

    /// The status of a stream's capture.
    fn status(&self, stream: u64) -> i32 {
        match self.active.get(&self.of_stream(stream)) {
            Some(work) if work.spoiled => SPOILED,
            Some(_) => ACTIVE,
            None => 0,
        }
    }

    /// A stream waits for an event of a capture: it takes part from now on.
    pub fn join(&mut self, stream: u64, id: u64) {
        if self.active.contains_key(&id) {
            self.by_stream.insert(stream, id);
        }
    }

    /// The capture that a stream takes part in, 0 for none.
    pub fn of_stream(&self, stream: u64) -> u64 {
        if self.active.is_empty() { 0 } else { self.by_stream.get(&stream).copied().unwrap_or(0) }
    }

    pub fn any_active(&self) -> bool {
        !self.active.is_empty()
    }

    pub fn is_active(&self, id: u64) -> bool {
        self.active.contains_key(&id)
    }

    /// Puts work into the capture of a stream; false where the stream is not capturing.
    pub fn add_node(&mut self, stream: u64, nanos: u64) -> bool {
        if self.active.is_empty() {
            return false;
        }
        let Some(work) = self.by_stream.get(&stream).and_then(|id| self.active.get_mut(id)) else { return false };
        work.nodes += 1;
        work.nanos += nanos;
        true
    }

    /// A node of a stream's capture may write to an address.
    pub fn note_write(&mut self, stream: u64, address: u64, bytes: u64) {
        if let Some(work) = self.by_stream.get(&stream).and_then(|id| self.active.get_mut(id)) {
            let known = work.writes.entry(address).or_default();
            *known = bytes.max(*known);
        }
    }
}

/// Runs a function of the host, or only notes it where the stream is capturing.
pub fn run_or_skip(stream: u64, run: impl FnOnce()) -> i32 {
    let captured = state::lock().captures.add_node(stream, streams::CALL_NANOS);
    if !captured {
        run();
    }
    SUCCESS
}

/// The code of a call that is unsafe in a capture: it takes or frees memory, or asks whether work is done. `None` where it
/// is allowed.
pub fn refused() -> Option<i32> {
    let forbidden = MODE.get() != RELAXED && state::lock().captures.forbids(thread::current().id(), MODE.get());
    forbidden.then_some(CAPTURE_UNSUPPORTED)
}

fn begin(stream: u64, mode: i32) -> i32 {
    state::lock().captures.begin(stream, mode).map_or(INVALID_VALUE, |_| SUCCESS)
}

fn end(stream: u64, graph: Out<u64>) -> i32 {
    let ended = state::lock().captures.end(stream);
    graph.set(ended.unwrap_or(0));
    ended.map_or_else(|code| code, |_| SUCCESS)
}

fn status(stream: u64, status: Out<i32>) -> i32 {
    status.set(state::lock().captures.status(stream));
    SUCCESS
}

/// Status, identifier and graph; no dependencies are listed.
fn info(stream: u64, status: Out<i32>, id: Out<u64>, graph: Out<u64>, lists: [Out<u64>; 2], count: Out<u64>) -> i32 {
    let shadow = state::lock();
    let of_stream = shadow.captures.of_stream(stream);
    status.set(shadow.captures.status(stream));
    id.set(of_stream);
    graph.set(shadow.captures.active.get(&of_stream).map_or(0, |work| work.graph));
    lists.into_iter().for_each(|list| list.set(0));
    count.set(0);
    SUCCESS
}

const NONE: Out<u64> = Out(std::ptr::null_mut());

fn create_graph(graph: Out<u64>) -> i32 {
    let made = new_handle(0);
    state::lock().captures.graphs.insert(made, GraphWork { graph: made, ..GraphWork::default() });
    graph.set(made);
    SUCCESS
}

/// An executable graph is a graph of its own: the one it was made from may be destroyed.
fn instantiate(executable: Out<u64>, graph: u64) -> i32 {
    let mut shadow = state::lock();
    let work = shadow.captures.graphs.get(&graph).cloned().unwrap_or_default();
    let made = new_handle(0);
    shadow.captures.graphs.insert(made, work);
    executable.set(made);
    SUCCESS
}

fn launch(executable: u64, stream: u64) -> i32 {
    let mut shadow = state::lock();
    let shadow = &mut *shadow;
    let work = shadow.captures.graphs.get(&executable);
    let nanos = work.map_or(0, |work| work.nanos);
    for (&address, &bytes) in work.iter().flat_map(|work| &work.writes) {
        shadow.values.forget_from(address, bytes);
    }
    shadow.clocks.elapse(streams::LAUNCH_NANOS);
    shadow.clocks.run(stream, nanos);
    shadow.counters.graph_launches += 1;
    SUCCESS
}

fn nodes(graph: u64, list: u64, count: Out<u64>) -> i32 {
    let number = state::lock().captures.graphs.get(&graph).map_or(0, |work| work.nodes);
    // Nodes have no objects: a program that asks for the list gets none.
    count.set(if list == 0 { number } else { 0 });
    SUCCESS
}

fn destroy(graph: u64) -> i32 {
    state::lock().captures.graphs.remove(&graph);
    SUCCESS
}

/// A node that a program adds by hand.
fn add_node(node: Out<u64>, graph: u64) -> i32 {
    node.set(new_handle(0));
    if let Some(work) = state::lock().captures.graphs.get_mut(&graph) {
        work.nodes += 1;
        work.nanos += streams::KERNEL_FLOOR_NANOS;
    }
    SUCCESS
}

fn exchange_mode(mode: Out<i32>) -> i32 {
    let new = crate::arguments::In(mode.0.cast_const()).get().unwrap_or(0);
    mode.set(MODE.replace(new));
    SUCCESS
}

cuda_functions! {
    fn cudaStreamBeginCapture(stream: u64, mode: i32) -> i32 { begin(stream, mode) }
    fn cudaStreamEndCapture(stream: u64, graph: Out<u64>) -> i32 { end(stream, graph) }
    fn cudaStreamIsCapturing(stream: u64, answer: Out<i32>) -> i32 { status(stream, answer) }
    fn cudaThreadExchangeStreamCaptureMode(mode: Out<i32>) -> i32 { exchange_mode(mode) }
    fn cudaGraphCreate(graph: Out<u64>, _flags: u32) -> i32 { create_graph(graph) }
    fn cudaGraphInstantiate(executable: Out<u64>, graph: u64, _flags: u64) -> i32 { instantiate(executable, graph) }
    fn cudaGraphInstantiateWithFlags(executable: Out<u64>, graph: u64, _flags: u64) -> i32 { instantiate(executable, graph) }
    fn cudaGraphInstantiateWithParams(executable: Out<u64>, graph: u64, _params: u64) -> i32 { instantiate(executable, graph) }
    fn cudaGraphLaunch(executable: u64, stream: u64) -> i32 { launch(executable, stream) }
    fn cudaGraphGetNodes(graph: u64, list: u64, count: Out<u64>) -> i32 { nodes(graph, list, count) }
    fn cudaGraphDestroy(graph: u64) -> i32 { destroy(graph) }
    fn cudaGraphExecDestroy(graph: u64) -> i32 { destroy(graph) }
    fn cudaGraphAddKernelNode(node: Out<u64>, graph: u64, _dependencies: u64, _count: u64, _params: u64) -> i32 { add_node(node, graph) }
    fn cudaGraphAddMemcpyNode(node: Out<u64>, graph: u64, _dependencies: u64, _count: u64, _params: u64) -> i32 { add_node(node, graph) }
    fn cudaGraphAddMemsetNode(node: Out<u64>, graph: u64, _dependencies: u64, _count: u64, _params: u64) -> i32 { add_node(node, graph) }
    fn cudaGraphAddEmptyNode(node: Out<u64>, graph: u64, _dependencies: u64, _count: u64) -> i32 { add_node(node, graph) }
    // Three shapes of one function: CUDA 11 and 12 by name, CUDA 13 under the oldest name.
    fn cudaStreamGetCaptureInfo_v2(stream: u64, answer: Out<i32>, id: Out<u64>, graph: Out<u64>, list: Out<u64>, count: Out<u64>) -> i32 {
        info(stream, answer, id, graph, [list, NONE], count)
    }
    fn cudaStreamGetCaptureInfo_v3(stream: u64, answer: Out<i32>, id: Out<u64>, graph: Out<u64>, list: Out<u64>, edges: Out<u64>, count: Out<u64>) -> i32 {
        info(stream, answer, id, graph, [list, edges], count)
    }
    fn cudaStreamGetCaptureInfo(stream: u64, answer: Out<i32>, id: Out<u64>) -> i32 { info(stream, answer, id, NONE, [NONE, NONE], NONE) }
    fn cuStreamBeginCapture_v2(stream: u64, mode: i32) -> i32 { begin(stream, mode) }
    fn cuStreamEndCapture(stream: u64, graph: Out<u64>) -> i32 { end(stream, graph) }
    fn cuStreamIsCapturing(stream: u64, answer: Out<i32>) -> i32 { status(stream, answer) }
    fn cuThreadExchangeStreamCaptureMode(mode: Out<i32>) -> i32 { exchange_mode(mode) }
    fn cuGraphCreate(graph: Out<u64>, _flags: u32) -> i32 { create_graph(graph) }
    fn cuGraphInstantiateWithFlags(executable: Out<u64>, graph: u64, _flags: u64) -> i32 { instantiate(executable, graph) }
    fn cuGraphLaunch(executable: u64, stream: u64) -> i32 { launch(executable, stream) }
    fn cuGraphGetNodes(graph: u64, list: u64, count: Out<u64>) -> i32 { nodes(graph, list, count) }
    fn cuGraphDestroy(graph: u64) -> i32 { destroy(graph) }
    fn cuGraphExecDestroy(graph: u64) -> i32 { destroy(graph) }
    fn cuStreamGetCaptureInfo_v2(stream: u64, answer: Out<i32>, id: Out<u64>, graph: Out<u64>, list: Out<u64>, count: Out<u64>) -> i32 {
        info(stream, answer, id, graph, [list, NONE], count)
    }
    fn cuStreamGetCaptureInfo_v3(stream: u64, answer: Out<i32>, id: Out<u64>, graph: Out<u64>, list: Out<u64>, edges: Out<u64>, count: Out<u64>) -> i32 {
        info(stream, answer, id, graph, [list, edges], count)
    }
    fn cuStreamGetCaptureInfo(stream: u64, answer: Out<i32>, id: Out<u64>) -> i32 { info(stream, answer, id, NONE, [NONE, NONE], NONE) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capture_spreads_by_events_and_counts_work() {
        let mut captures = Captures::default();
        let id = captures.begin(1, GLOBAL).unwrap();
        assert_eq!((captures.begin(1, GLOBAL), captures.of_stream(2)), (None, 0));
        captures.join(2, id);
        assert!(captures.add_node(1, 5) && captures.add_node(2, 7) && !captures.add_node(3, 9));
        let graph = captures.end(1).unwrap();
        assert_eq!((captures.graphs[&graph].nodes, captures.graphs[&graph].nanos), (2, 12));
        assert_eq!((captures.of_stream(2), captures.any_active(), captures.end(1)), (0, false, Err(INVALID_VALUE)));
        captures.join(2, id);
        assert_eq!(captures.of_stream(2), 0, "the capture has ended");
    }

    #[test]
    fn an_unsafe_call_spoils_a_capture_unless_its_thread_is_relaxed() {
        const THREAD_LOCAL: i32 = 1;
        let here = thread::current().id();
        let elsewhere = thread::spawn(|| thread::current().id()).join().unwrap();
        for (mode, caller, callers_mode, forbidden) in [
            (GLOBAL, here, GLOBAL, true),
            (GLOBAL, here, THREAD_LOCAL, true),
            (GLOBAL, here, RELAXED, false),
            (GLOBAL, elsewhere, GLOBAL, true),
            (GLOBAL, elsewhere, THREAD_LOCAL, false),
            (THREAD_LOCAL, here, GLOBAL, true),
            (THREAD_LOCAL, elsewhere, GLOBAL, false),
            (RELAXED, here, GLOBAL, false),
        ] {
            let mut captures = Captures::default();
            captures.begin(1, mode).unwrap();
            assert_eq!(captures.forbids(caller, callers_mode), forbidden, "{mode} {callers_mode}");
            assert_eq!(captures.status(1), if forbidden { SPOILED } else { ACTIVE });
            assert_eq!(captures.end(1).is_err(), forbidden);
        }
    }
}
