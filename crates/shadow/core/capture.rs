//! Capture of streams into graphs, and graphs.
//!
//! A capture belongs to the streams that take part: the one it began on and those that wait for an event recorded in it.
//! A graph keeps how many nodes it has, how long its work takes and where it writes.

use std::collections::{BTreeMap, HashMap};

use crate::{
    arguments::{Out, new_handle},
    errors::{INVALID_VALUE, SUCCESS},
    state, streams,
};

/// `cudaStreamCaptureStatusActive`.
const ACTIVE: i32 = 1;

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
}

impl Captures {
    fn begin(&mut self, stream: u64) -> Option<u64> {
        if self.by_stream.contains_key(&stream) {
            return None;
        }
        self.last_id += 1;
        self.by_stream.insert(stream, self.last_id);
        self.active.insert(self.last_id, GraphWork { graph: new_handle(0), ..GraphWork::default() });
        Some(self.last_id)
    }

    fn end(&mut self, stream: u64) -> Option<u64> {
        let id = self.by_stream.get(&stream).copied()?;
        self.by_stream.retain(|_, of| *of != id);
        let work = self.active.remove(&id)?;
        let graph = work.graph;
        self.graphs.insert(graph, work);
        Some(graph)
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

fn begin(stream: u64) -> i32 {
    state::lock().captures.begin(stream).map_or(INVALID_VALUE, |_| SUCCESS)
}

fn end(stream: u64, graph: Out<u64>) -> i32 {
    let ended = state::lock().captures.end(stream);
    graph.set(ended.unwrap_or(0));
    ended.map_or(INVALID_VALUE, |_| SUCCESS)
}

fn status(stream: u64, status: Out<i32>) -> i32 {
    let capturing = state::lock().captures.of_stream(stream) != 0;
    status.set(if capturing { ACTIVE } else { 0 });
    SUCCESS
}

/// Status, identifier and graph; no dependencies are listed.
fn info(stream: u64, status: Out<i32>, id: Out<u64>, graph: Out<u64>, lists: [Out<u64>; 2], count: Out<u64>) -> i32 {
    let shadow = state::lock();
    let of_stream = shadow.captures.of_stream(stream);
    status.set(if of_stream == 0 { 0 } else { ACTIVE });
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

/// Modes of capture: nothing is refused because of them, so the old one is always "global" unless it was exchanged.
fn exchange_mode(mode: Out<i32>) -> i32 {
    thread_local! {
        static MODE: std::cell::Cell<i32> = const { std::cell::Cell::new(0) };
    }
    let new = crate::arguments::In(mode.0.cast_const()).get().unwrap_or(0);
    mode.set(MODE.replace(new));
    SUCCESS
}

cuda_functions! {
    fn cudaStreamBeginCapture(stream: u64, _mode: i32) -> i32 { begin(stream) }
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
    fn cuStreamBeginCapture_v2(stream: u64, _mode: i32) -> i32 { begin(stream) }
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
        let id = captures.begin(1).unwrap();
        assert_eq!((captures.begin(1), captures.of_stream(2)), (None, 0));
        captures.join(2, id);
        assert!(captures.add_node(1, 5) && captures.add_node(2, 7) && !captures.add_node(3, 9));
        let graph = captures.end(1).unwrap();
        assert_eq!((captures.graphs[&graph].nodes, captures.graphs[&graph].nanos), (2, 12));
        assert_eq!((captures.of_stream(2), captures.any_active(), captures.end(1)), (0, false, None));
        captures.join(2, id);
        assert_eq!(captures.of_stream(2), 0, "the capture has ended");
    }
}
