//! Tests of convolutions with a small library in the place of cuDNN: what it is told, and what programs get.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::c_char,
    ptr::null_mut,
    sync::{Mutex, MutexGuard},
};

use super::{
    SUCCESS,
    backend::{
        self, CONFIG_ENGINE, DESCRIPTOR, Descriptor, ENGINE, ENGINE_CONFIG, ENGINE_GRAPH, GRAPH_OPERATIONS, HANDLE,
        HEURISTICS, HEURISTICS_GRAPH, HEURISTICS_RESULTS, INT64, OPERATION_GRAPH, PLAN, PLAN_CONFIG, PLAN_JSON,
        PLAN_WORKSPACE, Shared, Value,
    },
    installed::{Functions, check_versions, device_json, take},
    twins::{self, Twinned},
};
use crate::{
    arguments::Out,
    card::{Card, card},
    state,
};

const NOT_SUPPORTED: i32 = 3000;
const CONFIGS: u64 = 3;
/// Knobs of the third configuration: tiles of 64 x 64 in clusters of eight columns.
const SCHEDULED: &str = "{\"CUDNN_KNOB_TYPE_TILE_SIZE\":5,\"CUDNN_KNOB_TYPE_TILEK\":0,\"CUDNN_KNOB_TYPE_WORKSPACE\":1,\
                         \"CUDNN_KNOB_TYPE_TILE_CGA_M\":1,\"CUDNN_KNOB_TYPE_TILE_CGA_N\":8}";

/// A descriptor of the small library.
#[derive(Default)]
struct Known {
    kind: i32,
    attributes: BTreeSet<i32>,
    /// Configurations and plans: which one of the heuristics it is.
    place: u64,
}

static KNOWN: Mutex<BTreeMap<u64, Known>> = Mutex::new(BTreeMap::new());

fn known() -> MutexGuard<'static, BTreeMap<u64, Known>> {
    state::locked(&KNOWN)
}

extern "C" fn create(kind: i32, handle: *mut u64) -> i32 {
    let mut known = known();
    let new = known.keys().last().map_or(1, |last| last + 1);
    known.insert(new, Known { kind, ..Known::default() });
    Out(handle).set(new);
    SUCCESS
}

extern "C" fn destroy(handle: u64) -> i32 {
    known().remove(&handle);
    SUCCESS
}

extern "C" fn set(handle: u64, attribute: i32, kind: i32, _count: i64, elements: *const u8) -> i32 {
    let mut known = known();
    let first = crate::arguments::In(elements.cast::<u64>()).get().unwrap_or(0);
    let place = known.get(&first).filter(|_| attribute == PLAN_CONFIG).map_or(0, |config| config.place);
    let Some(descriptor) = known.get_mut(&handle) else { return NOT_SUPPORTED };
    descriptor.attributes.insert(attribute);
    descriptor.place += place;
    // Handles of the shadow GPU mean nothing to it.
    if kind == HANDLE { NOT_SUPPORTED } else { SUCCESS }
}

extern "C" fn finalize(handle: u64) -> i32 {
    let known = known();
    let descriptor = &known[&handle];
    let accepted = match descriptor.kind {
        HEURISTICS => descriptor.attributes.contains(&204),
        ENGINE => descriptor.attributes.contains(&1307),
        // The first configuration has no plan.
        PLAN => descriptor.attributes.contains(&407) && descriptor.place != 1,
        // Attribute 907 is a sign of tensors that it refuses.
        17 => !descriptor.attributes.contains(&907),
        _ => true,
    };
    if accepted { SUCCESS } else { NOT_SUPPORTED }
}

extern "C" fn get(handle: u64, attribute: i32, _kind: i32, wanted: i64, found: *mut i64, elements: *mut u8) -> i32 {
    let mut known = known();
    match attribute {
        HEURISTICS_RESULTS => {
            Out(found).set(CONFIGS as i64);
            for place in 0..wanted.max(0) as usize {
                let config = crate::arguments::In(elements.cast::<u64>().cast_const()).get_at(place).unwrap_or(0);
                known.get_mut(&config).unwrap().place = place as u64 + 1;
            }
        }
        PLAN_WORKSPACE => {
            Out(found).set(1);
            Out(elements.cast::<i64>()).set(1000 * known[&handle].place as i64);
        }
        PLAN_JSON if known[&handle].place == 3 => {
            Out(found).set(SCHEDULED.len() as i64);
            let text = SCHEDULED.bytes().take(wanted.max(0) as usize);
            text.enumerate().for_each(|(index, byte)| Out(elements).set_at(index, byte));
        }
        _ => return NOT_SUPPORTED,
    }
    SUCCESS
}

extern "C" fn version() -> usize {
    91_900
}

extern "C" fn cuda_version() -> usize {
    card().cuda as usize
}

extern "C" fn last_error(_buffer: *mut c_char, _length: usize) {}

fn take_small_library() {
    take(Functions { create, destroy, set, get, finalize, version, cuda_version, last_error }).map(drop).unwrap();
}

/// Heuristics of the sample graph with a handle, as programs describe them.
fn heuristics(graph: Shared) -> Shared {
    graph.set(800, Value::Bytes { kind: HANDLE, count: 1, bytes: vec![7; 8] });
    Descriptor::with(HEURISTICS, [(HEURISTICS_GRAPH, Value::Descriptors(vec![graph]))])
}

/// The sample graph with a tensor that the small library refuses.
fn refused_graph() -> Shared {
    let graph = twins::sample_graph();
    let operation = graph.descriptors(GRAPH_OPERATIONS).remove(0);
    operation.descriptors(704)[0].set(907, Value::Bytes { kind: 2, count: 1, bytes: vec![1] });
    graph
}

fn configs_of(heuristics: &Shared, room: usize) -> (i64, Vec<Shared>) {
    let configs: Vec<Shared> = (0..room).map(|_| Descriptor::with(ENGINE_CONFIG, [])).collect();
    let mut handles: Vec<u64> = configs.iter().map(|config| std::sync::Arc::as_ptr(config) as u64).collect();
    let mut found = -1;
    let elements = if room == 0 { null_mut() } else { handles.as_mut_ptr().cast() };
    let of = std::sync::Arc::as_ptr(heuristics) as u64;
    let status = backend::get_attribute(of, HEURISTICS_RESULTS, DESCRIPTOR, room as i64, Out(&raw mut found), elements);
    assert_eq!(status, SUCCESS);
    (found, configs)
}

fn plan_of(config: &Shared) -> Shared {
    let handle = Value::Bytes { kind: HANDLE, count: 1, bytes: vec![7; 8] };
    Descriptor::with(PLAN, [(400, handle), (PLAN_CONFIG, Value::Descriptors(vec![config.clone()]))])
}

fn workspace_of(plan: &Shared) -> i64 {
    let (mut found, mut bytes) = (0, -1i64);
    let of = std::sync::Arc::as_ptr(plan) as u64;
    let elements = (&raw mut bytes).cast();
    assert_eq!(backend::get_attribute(of, PLAN_WORKSPACE, INT64, 1, Out(&raw mut found), elements), SUCCESS);
    assert_eq!(found, 1);
    bytes
}

#[test]
fn the_library_gives_configurations_refuses_plans_and_says_workspaces() {
    take_small_library();
    let heuristics = heuristics(twins::sample_graph());
    assert_eq!(configs_of(&heuristics, 0).0, CONFIGS as i64);
    let (_, configs) = configs_of(&heuristics, CONFIGS as usize);
    let plans: Vec<Shared> = configs.iter().map(plan_of).collect();
    let statuses: Vec<i32> = plans.iter().map(|plan| twins::finalize(plan)).collect();
    assert_eq!(statuses, [NOT_SUPPORTED, SUCCESS, SUCCESS]);
    // 64 tiles are four waves without a GPU and less than one on the card, which needs no counter of 131 bytes.
    assert_eq!((workspace_of(&plans[1]), workspace_of(&plans[2])), (2000, 3000 - 131));
    // A plan knows its operations, for the time that it takes.
    assert_eq!(plans[1].operations().len(), 1);
    assert!(twins::try_convolution().is_ok());
}

#[test]
fn an_engine_chosen_by_number_is_described_to_the_library() {
    take_small_library();
    let engine = Descriptor::with(ENGINE, [(ENGINE_GRAPH, Value::Descriptors(vec![twins::sample_graph()]))]);
    assert_eq!(twins::finalize(&engine), SUCCESS);
    assert!(matches!(engine.twin(), Twinned::Made(_)));
    let config = Descriptor::with(ENGINE_CONFIG, [(CONFIG_ENGINE, Value::Descriptors(vec![engine]))]);
    assert_eq!(twins::finalize(&config), SUCCESS);
    let plan = plan_of(&config);
    assert_eq!((twins::finalize(&plan), workspace_of(&plan)), (SUCCESS, 0));
}

#[test]
fn convolutions_that_the_library_refuses_follow_the_rule() {
    take_small_library();
    let (found, configs) = configs_of(&heuristics(refused_graph()), 1);
    assert_eq!(found, 1);
    let plan = plan_of(&configs[0]);
    assert_eq!(twins::finalize(&plan), SUCCESS);
    assert!(matches!(plan.twin(), Twinned::Untried));
    let by_rule = super::workspace::of_operations(&refused_graph().operations());
    assert_eq!(workspace_of(&plan), by_rule);
}

#[test]
fn graphs_without_a_convolution_have_no_twins() {
    take_small_library();
    let graph = Descriptor::with(OPERATION_GRAPH, []);
    assert_eq!(configs_of(&heuristics(graph.clone()), 0).0, 1);
    assert!(matches!(graph.twin(), Twinned::Untried));
}

#[test]
fn old_libraries_and_other_cudas_are_refused() {
    assert_eq!(check_versions(90_800, 13_010, 13_000), Ok(()));
    assert_eq!(check_versions(90_701, 13_000, 13_000), Err("cuDNN 9.7 is installed".to_owned()));
    let other = check_versions(91_900, 12_090, 13_000).unwrap_err();
    assert_eq!(other, "cuDNN is installed for CUDA 12, PyTorch for CUDA 13");
}

#[test]
fn the_card_is_described_with_23_keys() {
    let json = device_json(&Card { name: "A \"card\"".to_owned(), multiprocessors: 108, ..Card::default() });
    assert_eq!(json.matches("\":").count(), 23);
    assert!(json.starts_with("{\"maxGridSize\":[2147483647,65535,65535],") && json.ends_with("320}"), "{json}");
    for part in ["\"multiProcessorCount\":108,", "\"deviceName\":\"A card\"", "\"deviceVer\":900,"] {
        assert!(json.contains(part), "{json}");
    }
    assert_eq!(json.matches(['{', '[']).count(), json.matches(['}', ']']).count());
}
