//! cuDNN's backend API: descriptors keep what is set, heuristics give one engine, a plan has a workspace.
//! For convolutions the installed cuDNN answers where there is one ([`twins`]).
//!
//! Numbers of descriptor types and attributes are those of `cudnn_graph.h`.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard},
};

use super::{
    BAD_PARAM, SUCCESS,
    twins::{self, Twinned},
    workspace,
};
use crate::{
    arguments::{In, Out, host_bytes, is_host},
    launch, state, streams,
};

/// Types of descriptors (`cudnnBackendDescriptorType_t`).
pub const ENGINE: i32 = 2;
pub const ENGINE_CONFIG: i32 = 3;
pub const HEURISTICS: i32 = 4;
pub const PLAN: i32 = 5;
pub const OPERATION_GRAPH: i32 = 15;
/// Attributes (`cudnnBackendAttributeName_t`).
pub const HEURISTICS_MODE: i32 = 200;
pub const HEURISTICS_GRAPH: i32 = 201;
pub const HEURISTICS_RESULTS: i32 = 202;
pub const CONFIG_ENGINE: i32 = 300;
const CONFIG_WORKSPACE: i32 = 303;
const CONFIG_SHARED_MEMORY: i32 = 304;
pub const PLAN_CONFIG: i32 = 401;
pub const PLAN_WORKSPACE: i32 = 402;
pub const PLAN_JSON: i32 = 405;
pub const GRAPH_OPERATIONS: i32 = 801;
const GRAPH_ENGINE_COUNT: i32 = 802;
pub const ENGINE_GRAPH: i32 = 1300;
const ENGINE_INDEX: i32 = 1301;
/// Types of attributes (`cudnnBackendAttributeType_t`).
pub const HANDLE: i32 = 0;
pub const INT64: i32 = 3;
pub const DESCRIPTOR: i32 = 15;
pub const CHARACTER: i32 = 24;

/// Bytes of an element of an attribute.
fn width(kind: i32) -> usize {
    match kind {
        2 | CHARACTER => 1,
        // Handle, 64-bit integer, double, pointer, descriptor.
        HANDLE | INT64 | 5 | 6 | DESCRIPTOR => 8,
        26 => 16,
        // Enumerations, floats, 32-bit integers.
        _ => 4,
    }
}

/// A descriptor. Others that refer to it keep it alive.
pub struct Descriptor {
    pub kind: i32,
    values: Mutex<BTreeMap<i32, Value>>,
    twin: Mutex<Twinned>,
}

pub type Shared = Arc<Descriptor>;

#[derive(Clone)]
pub enum Value {
    Bytes { kind: i32, count: i64, bytes: Vec<u8> },
    Descriptors(Vec<Shared>),
}

impl Descriptor {
    fn new(kind: i32) -> Shared {
        Descriptor::with(kind, [])
    }

    /// A descriptor with values.
    pub fn with(kind: i32, values: impl IntoIterator<Item = (i32, Value)>) -> Shared {
        Arc::new(Descriptor { kind, values: Mutex::new(values.into_iter().collect()), twin: Mutex::default() })
    }

    fn values(&self) -> MutexGuard<'_, BTreeMap<i32, Value>> {
        state::locked(&self.values)
    }

    pub fn set(&self, attribute: i32, value: Value) {
        self.values().insert(attribute, value);
    }

    /// All attributes that were set.
    pub fn all_values(&self) -> BTreeMap<i32, Value> {
        self.values().clone()
    }

    pub fn twin(&self) -> Twinned {
        state::locked(&self.twin).clone()
    }

    pub fn set_twin(&self, twin: Twinned) {
        *state::locked(&self.twin) = twin;
    }

    /// The descriptors of an attribute.
    pub fn descriptors(&self, attribute: i32) -> Vec<Shared> {
        match self.values().get(&attribute) {
            Some(Value::Descriptors(list)) => list.clone(),
            _ => Vec::new(),
        }
    }

    /// All descriptors it refers to, with the attribute.
    pub fn all_descriptors(&self) -> Vec<(i32, Shared)> {
        let values = self.values();
        values
            .iter()
            .flat_map(|(&attribute, value)| match value {
                Value::Descriptors(list) => list.iter().map(|descriptor| (attribute, descriptor.clone())).collect(),
                Value::Bytes { .. } => Vec::new(),
            })
            .collect()
    }

    /// 64-bit numbers of an attribute.
    pub fn numbers(&self, attribute: i32) -> Vec<i64> {
        match self.values().get(&attribute) {
            Some(Value::Bytes { bytes, .. }) => {
                bytes.as_chunks::<8>().0.iter().map(|chunk| i64::from_le_bytes(*chunk)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// A 32-bit number of an attribute.
    pub fn small_number(&self, attribute: i32) -> Option<i32> {
        match self.values().get(&attribute) {
            Some(Value::Bytes { bytes, .. }) => bytes.first_chunk().map(|chunk| i32::from_le_bytes(*chunk)),
            _ => None,
        }
    }

    /// Takes over all values of another.
    pub fn copy_from(&self, other: &Descriptor) {
        let values = other.values().clone();
        *self.values() = values;
    }

    /// The operations of the graph behind a plan, an engine config or an engine.
    pub fn operations(&self) -> Vec<Shared> {
        let next = match self.kind {
            PLAN => PLAN_CONFIG,
            ENGINE_CONFIG => CONFIG_ENGINE,
            ENGINE => ENGINE_GRAPH,
            OPERATION_GRAPH => return self.descriptors(GRAPH_OPERATIONS),
            _ => return Vec::new(),
        };
        self.descriptors(next).first().map_or_else(Vec::new, |next| next.operations())
    }
}

/// The descriptor behind a handle that `cudnnBackendCreateDescriptor` gave.
pub fn borrow(handle: u64) -> Option<Shared> {
    if !is_host(handle as *const Descriptor) {
        return None;
    }
    let pointer = handle as *const Descriptor;
    // SAFETY: handles are pointers from `Arc::into_raw` in `create`, which the program owns until it destroys them. The
    // count is increased before a second `Arc` is made from the pointer.
    unsafe {
        Arc::increment_strong_count(pointer);
        Some(Arc::from_raw(pointer))
    }
}

fn create(kind: i32, handle: Out<u64>) -> i32 {
    handle.set(Arc::into_raw(Descriptor::new(kind)) as u64);
    SUCCESS
}

fn destroy(handle: u64) -> i32 {
    if is_host(handle as *const Descriptor) {
        // SAFETY: as in `borrow`; the program gives up its handle, so its count goes.
        drop(unsafe { Arc::from_raw(handle as *const Descriptor) });
    }
    SUCCESS
}

fn set_attribute(handle: u64, attribute: i32, kind: i32, count: i64, elements: *const u8) -> i32 {
    let Some(descriptor) = borrow(handle) else { return BAD_PARAM };
    let count = count.max(0);
    let value = if kind == DESCRIPTOR {
        let list = In(elements.cast::<u64>());
        Value::Descriptors((0..count as usize).filter_map(|index| borrow(list.get_at(index)?)).collect())
    } else {
        Value::Bytes { kind, count, bytes: host_bytes(elements, count as usize * width(kind)).to_vec() }
    };
    descriptor.set(attribute, value);
    SUCCESS
}

/// Fills a descriptor that the caller made, the first of an array.
fn fill_first(elements: *mut u8, wanted: i64, source: &Descriptor) {
    if wanted > 0
        && let Some(target) = In(elements.cast::<u64>().cast_const()).get().and_then(borrow)
    {
        target.copy_from(source);
    }
}

fn number(found: Out<i64>, elements: *mut u8, value: i64) -> i32 {
    found.set(1);
    Out(elements.cast::<i64>()).set(value);
    SUCCESS
}

/// One engine for the graph of a heuristics descriptor.
pub fn engine_config(heuristics: &Descriptor) -> Shared {
    let graph = Value::Descriptors(heuristics.descriptors(HEURISTICS_GRAPH));
    let index = Value::Bytes { kind: INT64, count: 1, bytes: vec![0; 8] };
    let engine = Descriptor::with(ENGINE, [(ENGINE_GRAPH, graph), (ENGINE_INDEX, index)]);
    Descriptor::with(ENGINE_CONFIG, [(CONFIG_ENGINE, Value::Descriptors(vec![engine]))])
}

pub fn get_attribute(handle: u64, attribute: i32, kind: i32, wanted: i64, found: Out<i64>, elements: *mut u8) -> i32 {
    let Some(descriptor) = borrow(handle) else {
        found.set(0);
        return BAD_PARAM;
    };
    if let Some(answer) = twins::get(&descriptor, attribute, kind, wanted, elements) {
        found.set(answer.unwrap_or(0));
        return answer.err().unwrap_or(SUCCESS);
    }
    match (descriptor.kind, attribute) {
        (HEURISTICS, HEURISTICS_RESULTS) => {
            found.set(1);
            fill_first(elements, wanted, &engine_config(&descriptor));
            return SUCCESS;
        }
        (ENGINE_CONFIG, CONFIG_ENGINE) | (PLAN, PLAN_CONFIG) => {
            let inner = descriptor.descriptors(attribute);
            found.set(inner.len().min(1) as i64);
            inner.first().into_iter().for_each(|inner| fill_first(elements, wanted, inner));
            return SUCCESS;
        }
        (ENGINE_CONFIG, CONFIG_SHARED_MEMORY) => {
            found.set(1);
            Out(elements.cast::<i32>()).set(0);
            return SUCCESS;
        }
        (ENGINE_CONFIG, CONFIG_WORKSPACE) | (PLAN, PLAN_WORKSPACE) => {
            return number(found, elements, workspace::of_operations(&descriptor.operations()));
        }
        (OPERATION_GRAPH, GRAPH_ENGINE_COUNT) => return number(found, elements, 1),
        _ => {}
    }
    if kind == CHARACTER {
        // Plans as JSON: an empty object.
        found.set(3);
        (0..wanted.clamp(0, 3) as usize).for_each(|index| Out(elements).set_at(index, b"{}\0"[index]));
        return SUCCESS;
    }
    match descriptor.values().get(&attribute) {
        Some(Value::Bytes { count, bytes, .. }) => {
            found.set(*count);
            let length = bytes.len().min(wanted.max(0) as usize * width(kind));
            (0..length).for_each(|index| Out(elements).set_at(index, bytes[index]));
        }
        Some(Value::Descriptors(list)) => found.set(list.len() as i64),
        // Notes, knobs and support bits: none.
        None => found.set(0),
    }
    SUCCESS
}

/// Runs a plan: time by the sizes of its operations. Outputs are not known.
fn execute(handle: u64, plan: u64) -> i32 {
    let nanos = borrow(plan).map_or(0, |plan| workspace::nanos_of_operations(&plan.operations()));
    launch::library_work(streams::of_library(handle), "cudnn plan", nanos, 0);
    SUCCESS
}

cuda_functions! {
    fn cudnnBackendCreateDescriptor(kind: i32, handle: Out<u64>) -> i32 { create(kind, handle) }
    fn cudnnBackendDestroyDescriptor(handle: u64) -> i32 { destroy(handle) }
    fn cudnnBackendInitialize(_handle: u64) -> i32 { SUCCESS }
    fn cudnnBackendFinalize(handle: u64) -> i32 { borrow(handle).map_or(SUCCESS, |descriptor| twins::finalize(&descriptor)) }
    fn cudnnBackendSetAttribute(handle: u64, attribute: i32, kind: i32, count: i64, elements: *const u8) -> i32 { set_attribute(handle, attribute, kind, count, elements) }
    fn cudnnBackendGetAttribute(handle: u64, attribute: i32, kind: i32, wanted: i64, found: Out<i64>, elements: *mut u8) -> i32 {
        get_attribute(handle, attribute, kind, wanted, found, elements)
    }
    fn cudnnBackendExecute(handle: u64, plan: u64, _pack: u64) -> i32 { execute(handle, plan) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(kind: i32) -> u64 {
        let mut handle = 0;
        create(kind, Out(&raw mut handle));
        handle
    }

    fn set_descriptor(handle: u64, attribute: i32, other: u64) {
        assert_eq!(set_attribute(handle, attribute, DESCRIPTOR, 1, (&raw const other).cast()), SUCCESS);
    }

    #[test]
    fn heuristics_give_a_config_whose_plan_has_a_workspace() {
        let (graph, heuristics, config, plan) = (new(OPERATION_GRAPH), new(HEURISTICS), new(ENGINE_CONFIG), new(PLAN));
        set_descriptor(heuristics, HEURISTICS_GRAPH, graph);
        let (mut found, mut bytes) = (-1, -1i64);
        let elements = [config];
        get_attribute(
            heuristics,
            HEURISTICS_RESULTS,
            DESCRIPTOR,
            1,
            Out(&raw mut found),
            elements.as_ptr().cast_mut().cast(),
        );
        assert_eq!(found, 1);
        set_descriptor(plan, PLAN_CONFIG, config);
        // The program may destroy what a plan refers to.
        assert_eq!([graph, heuristics, config].map(destroy), [SUCCESS; 3]);
        assert_eq!(
            get_attribute(plan, PLAN_WORKSPACE, INT64, 1, Out(&raw mut found), (&raw mut bytes).cast()),
            SUCCESS
        );
        assert_eq!((found, bytes), (1, 0), "a graph without operations needs none");
        destroy(plan);
    }
}
