//! Descriptors of convolutions have a twin in the installed cuDNN, which answers for them.
//!
//! What a program sets is kept ([`Descriptor`]). A twin is made from it where an answer needs one: for heuristics, engines
//! and plans of graphs with a convolution. The handle of cuDNN is left out: the properties of the card stand in its
//! place. Attention has no twins: its plans are compiled by NVRTC, of which there is only a stand-in.

use std::{ptr::null_mut, sync::Arc};

use super::{
    BAD_PARAM, SUCCESS,
    backend::{
        self, CHARACTER, CONFIG_ENGINE, DESCRIPTOR, Descriptor, ENGINE, ENGINE_CONFIG, ENGINE_GRAPH, GRAPH_OPERATIONS,
        HANDLE, HEURISTICS, HEURISTICS_GRAPH, HEURISTICS_MODE, HEURISTICS_RESULTS, INT64, OPERATION_GRAPH, PLAN,
        PLAN_CONFIG, PLAN_JSON, PLAN_WORKSPACE, Shared, Value, borrow,
    },
    installed::{Installed, installed},
    stream_k::{self, Knobs},
    workspace,
};
use crate::{
    arguments::{In, Out, is_host},
    card::card,
    state,
};

/// Attributes that take the properties of a device.
const HEURISTICS_DEVICE: i32 = 204;
const PLAN_DEVICE: i32 = 407;
const ENGINE_DEVICE: i32 = 1307;

/// A descriptor of the installed library.
pub struct Twin {
    library: &'static Installed,
    handle: u64,
}

impl Twin {
    fn new(library: &'static Installed, kind: i32) -> Result<Twin, i32> {
        Ok(Twin { library, handle: library.create(kind)? })
    }

    fn set_descriptors(&self, attribute: i32, handles: &[u64]) -> Result<(), i32> {
        let bytes: Vec<u8> = handles.iter().flat_map(|handle| handle.to_le_bytes()).collect();
        self.library.set(self.handle, attribute, DESCRIPTOR, handles.len() as i64, &bytes)
    }

    /// A text; empty where the library has none.
    fn text(&self, attribute: i32) -> String {
        let get = |length: i64, buffer: *mut u8| self.library.get(self.handle, attribute, CHARACTER, length, buffer);
        let length = get(0, null_mut()).unwrap_or(0).max(0);
        let mut buffer = vec![0; length as usize];
        if get(length, buffer.as_mut_ptr()).is_err() {
            return String::new();
        }
        String::from_utf8_lossy(&buffer).into_owned()
    }
}

impl Drop for Twin {
    fn drop(&mut self) {
        self.library.destroy(self.handle);
    }
}

/// What is known of the twin of a descriptor.
#[derive(Clone, Default)]
pub enum Twinned {
    #[default]
    Untried,
    /// The library refused it with this status.
    Refused(i32),
    Made(Arc<Twin>),
}

/// The twin of a descriptor that a program described; made if there is none.
fn twin_of(library: &'static Installed, descriptor: &Descriptor) -> Result<Arc<Twin>, i32> {
    match descriptor.twin() {
        Twinned::Made(twin) => return Ok(twin),
        Twinned::Refused(status) => return Err(status),
        Twinned::Untried => {}
    }
    let made = described(library, descriptor).map(Arc::new);
    descriptor.set_twin(match &made {
        Ok(twin) => Twinned::Made(twin.clone()),
        Err(status) => Twinned::Refused(*status),
    });
    made
}

/// A new descriptor of the library with the attributes of one of the program.
fn described(library: &'static Installed, descriptor: &Descriptor) -> Result<Twin, i32> {
    let twin = Twin::new(library, descriptor.kind)?;
    for (attribute, value) in descriptor.all_values() {
        match value {
            Value::Bytes { kind: HANDLE, .. } => {}
            Value::Bytes { kind, count, bytes } => library.set(twin.handle, attribute, kind, count, &bytes)?,
            Value::Descriptors(list) => {
                let twins = list.iter().map(|other| twin_of(library, other)).collect::<Result<Vec<_>, i32>>()?;
                let handles: Vec<u64> = twins.iter().map(|twin| twin.handle).collect();
                twin.set_descriptors(attribute, &handles)?;
            }
        }
    }
    let device = match descriptor.kind {
        HEURISTICS => Some(HEURISTICS_DEVICE),
        PLAN => Some(PLAN_DEVICE),
        ENGINE => Some(ENGINE_DEVICE),
        _ => None,
    };
    if let Some(attribute) = device {
        twin.set_descriptors(attribute, &[library.device()])?;
    }
    library.finalize(twin.handle)?;
    Ok(twin)
}

/// The library, if it answers for the graph of heuristics or an engine: a graph with a convolution that it accepts.
fn library_for(graph: &Descriptor) -> Option<&'static Installed> {
    if !graph.operations().iter().any(|operation| workspace::is_convolution(operation)) {
        return None;
    }
    let library = installed()?;
    twin_of(library, graph).is_ok().then_some(library)
}

/// The end of a description: engines, configurations and plans of convolutions may be refused by the library. The
/// program goes on with its next choice then.
pub fn finalize(descriptor: &Descriptor) -> i32 {
    let first = |attribute: i32| descriptor.descriptors(attribute).into_iter().next();
    let of_inner = |attribute: i32| match first(attribute)?.twin() {
        Twinned::Made(twin) => Some(twin.library),
        _ => None,
    };
    let library = match descriptor.kind {
        ENGINE => first(ENGINE_GRAPH).and_then(|graph| library_for(&graph)),
        ENGINE_CONFIG => of_inner(CONFIG_ENGINE),
        PLAN => of_inner(PLAN_CONFIG),
        _ => None,
    };
    library.map_or(SUCCESS, |library| twin_of(library, descriptor).err().unwrap_or(SUCCESS))
}

/// An answer of the library: the status, and how many elements there are. `None` where the library does not answer.
pub fn get(
    descriptor: &Descriptor,
    attribute: i32,
    kind: i32,
    wanted: i64,
    elements: *mut u8,
) -> Option<Result<i64, i32>> {
    let twin = match descriptor.kind {
        HEURISTICS => {
            let graph = descriptor.descriptors(HEURISTICS_GRAPH).into_iter().next()?;
            twin_of(library_for(&graph)?, descriptor).ok()?
        }
        OPERATION_GRAPH => twin_of(library_for(descriptor)?, descriptor).ok()?,
        _ => match descriptor.twin() {
            Twinned::Made(twin) => twin,
            _ => return None,
        },
    };
    if descriptor.kind == PLAN && attribute == PLAN_WORKSPACE {
        return Some(plan_workspace(&twin, descriptor, elements));
    }
    if kind != DESCRIPTOR {
        return Some(twin.library.get(twin.handle, attribute, kind, wanted, elements));
    }
    Some(get_descriptors(&twin, descriptor, attribute, wanted, elements))
}

/// The workspace of a plan: as the library says. Kernels of Hopper that are scheduled by the number of multiprocessors
/// need another size on the card than without one.
fn plan_workspace(twin: &Twin, plan: &Descriptor, elements: *mut u8) -> Result<i64, i32> {
    let mut bytes = 0i64;
    twin.library.get(twin.handle, PLAN_WORKSPACE, INT64, 1, (&raw mut bytes).cast())?;
    let mut by_rule = false;
    if let Some(knobs) = Knobs::of_json(&twin.text(PLAN_JSON)) {
        let on_card = workspace::convolution_of(&plan.operations()).and_then(|(convolution, bfloat16)| {
            let multiprocessors = u64::from(card().multiprocessors.unsigned_abs());
            stream_k::workspace(bytes.unsigned_abs(), knobs, &convolution, bfloat16, multiprocessors)
        });
        bytes = on_card.map_or(bytes, |on_card| on_card.bytes as i64);
        by_rule = on_card.is_none_or(|on_card| on_card.fitted);
    }
    state::lock().counters.assume(match by_rule {
        true => "cudnn_convolution_workspace_by_rule",
        false => "cudnn_convolution_workspace_by_cudnn",
    });
    Out(elements.cast::<i64>()).set(bytes);
    Ok(1)
}

/// Descriptors are filled by the library: each of the program's gets a new twin for that.
fn get_descriptors(
    twin: &Twin,
    descriptor: &Descriptor,
    attribute: i32,
    wanted: i64,
    elements: *mut u8,
) -> Result<i64, i32> {
    let wanted = if is_host(elements) { wanted.max(0) } else { 0 };
    let list = In(elements.cast::<u64>().cast_const());
    let targets: Vec<Shared> = (0..wanted as usize)
        .map(|index| list.get_at(index).and_then(borrow).ok_or(BAD_PARAM))
        .collect::<Result<_, i32>>()?;
    let new = targets
        .iter()
        .map(|target| Twin::new(twin.library, target.kind).map(Arc::new))
        .collect::<Result<Vec<Arc<Twin>>, i32>>()?;
    let mut handles: Vec<u64> = new.iter().map(|twin| twin.handle).collect();
    let found = twin.library.get(twin.handle, attribute, DESCRIPTOR, wanted, handles.as_mut_ptr().cast())?;
    for (target, twin) in targets.iter().zip(new).take(found.max(0) as usize) {
        match attribute {
            HEURISTICS_RESULTS => target.copy_from(&backend::engine_config(descriptor)),
            _ => descriptor.descriptors(attribute).iter().take(1).for_each(|inner| target.copy_from(inner)),
        }
        target.set_twin(Twinned::Made(twin));
    }
    Ok(found)
}

/// A small convolution: 2 images of 8 channels, 8 filters of 3 x 3, in float32.
pub fn sample_graph() -> Shared {
    let numbers = |kind: i32, values: &[i64]| {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Value::Bytes { kind, count: values.len() as i64, bytes }
    };
    // Enumerations: float32 and cross-correlation are 0 and 1.
    let choice = |kind: i32, value: i32| Value::Bytes { kind, count: 1, bytes: value.to_le_bytes().to_vec() };
    let tensor = |name: i64, sizes: [i64; 4]| {
        let strides = [sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3], 1];
        let values = [
            (900, numbers(INT64, &[16])),
            (901, choice(1, 0)),
            (902, numbers(INT64, &sizes)),
            (903, numbers(INT64, &strides)),
            (906, numbers(INT64, &[name])),
        ];
        Descriptor::with(17, values)
    };
    let mut values = vec![(100, choice(1, 0)), (101, choice(7, 1)), (106, numbers(INT64, &[2]))];
    values.extend((102..=105).map(|attribute| (attribute, numbers(INT64, &[1, 1]))));
    let one = Value::Bytes { kind: 5, count: 1, bytes: 1f64.to_le_bytes().to_vec() };
    let zero = Value::Bytes { kind: 5, count: 1, bytes: 0f64.to_le_bytes().to_vec() };
    let parts = [
        (700, one),
        (701, zero),
        (702, Value::Descriptors(vec![Descriptor::with(1, values)])),
        (703, Value::Descriptors(vec![tensor(2, [8, 8, 3, 3])])),
        (704, Value::Descriptors(vec![tensor(1, [2, 8, 16, 16])])),
        (705, Value::Descriptors(vec![tensor(3, [2, 8, 16, 16])])),
    ];
    let operation = Descriptor::with(workspace::CONVOLUTION_FORWARD, parts);
    Descriptor::with(OPERATION_GRAPH, [(GRAPH_OPERATIONS, Value::Descriptors(vec![operation]))])
}

/// Makes all plans of a convolution. Fails with the status of the library if none can be made.
pub fn try_convolution() -> Result<(), i32> {
    let library = installed().ok_or(BAD_PARAM)?;
    let mode = Value::Bytes { kind: 8, count: 1, bytes: vec![0; 4] };
    let graph = Value::Descriptors(vec![sample_graph()]);
    let heuristics = Descriptor::with(HEURISTICS, [(HEURISTICS_MODE, mode), (HEURISTICS_GRAPH, graph)]);
    let twin = twin_of(library, &heuristics)?;
    let count = library.get(twin.handle, HEURISTICS_RESULTS, DESCRIPTOR, 0, null_mut())?;
    let configs: Vec<Shared> = (0..count).map(|_| Descriptor::with(ENGINE_CONFIG, [])).collect();
    let mut handles: Vec<u64> = configs.iter().map(|config| Arc::as_ptr(config) as u64).collect();
    get_descriptors(&twin, &heuristics, HEURISTICS_RESULTS, count, handles.as_mut_ptr().cast())?;
    let plan =
        |config: &Shared| finalize(&Descriptor::with(PLAN, [(PLAN_CONFIG, Value::Descriptors(vec![config.clone()]))]));
    let statuses: Vec<i32> = configs.iter().map(plan).collect();
    if statuses.contains(&SUCCESS) { Ok(()) } else { Err(statuses.first().copied().unwrap_or(BAD_PARAM)) }
}
