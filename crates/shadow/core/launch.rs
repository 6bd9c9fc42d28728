//! Kernels: their names, their launches, and what a launch tells about values.
//!
//! Nothing runs, except small computations on known values (`compute`). A launch takes time on its stream, is remembered as
//! the last kernel of the stream (it made what is read next), and ends the life of known values that it may overwrite: every
//! known value whose address is among its arguments, except where the kernel is known to read it. PyTorch's element-wise
//! kernels get their output as the first pointer, its reductions as the second, behind their input.
//!
//! The number and the sizes of a kernel's arguments are not known (they are in compressed device code). Arguments of a
//! launch lie on the caller's stack, so the words there are looked at, within the stack and within bounds.

use std::{
    cell::Cell,
    collections::HashMap,
    sync::{Arc, LazyLock, OnceLock, RwLock},
};

use crate::{
    arguments::{In, Out, Text, is_host},
    card::is_device_address,
    compute::{self, Computed, Recipe, compute},
    errors::{INVALID_VALUE, SUCCESS},
    state::{self, Shadow, current},
    streams,
    values::UNKNOWN_LENGTH,
};

/// A kernel and what its name says.
pub struct Kernel {
    name: String,
    kind: KernelKind,
    /// What it computes, where that is known. Looked up at the first launch: most kernels are never launched.
    recipe: OnceLock<Option<Recipe>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KernelKind {
    /// The first word of this argument is the output; all other pointers are inputs.
    OutputFirst(usize),
    /// The same, for the first pointer in the second argument: it lies behind sizes and strides.
    OutputInLambda,
    /// The first pointer is the input, the second the output.
    Reduction,
    /// Counts nonzero elements: `args[2]` is the number of items.
    NonzeroCount,
    /// The second pass of a sum: what it reads was counted by the first.
    SecondPass,
    Other,
}

/// Sums along a dimension, gathers and concatenations: the output is the first argument.
const POINTERS_FIRST: [&str; 3] = ["tensor_kernel_scan_", "vectorized_gather_kernel", "CatArrayBatchedCopy"];
/// Element-wise kernels with an array of pointers, the output first.
const POINTERS_THIRD: [&str; 4] = [
    "vectorized_elementwise_kernel",
    "vectorized_templated_elementwise_kernel",
    "unrolled_elementwise_kernel",
    "elementwise_kernel_with_index",
];

impl Kernel {
    fn new(name: &str) -> Kernel {
        let nonzero = name.contains("NonZero") || name.contains("CountMask");
        let kind = match () {
            // cub::DeviceReduce takes one pass (SingleTile over the input) or two: the second over partial sums in memory,
            // whose type does not name the predicate.
            () if nonzero && name.contains("DeviceReduce") => KernelKind::NonzeroCount,
            () if name.contains("DeviceReduceSingleTile") => KernelKind::SecondPass,
            // Values and their places: two outputs behind the input.
            () if name.contains("multi_outputs") || name.contains("_with_indices") => KernelKind::Other,
            () if POINTERS_FIRST.iter().any(|part| name.contains(part)) => KernelKind::OutputFirst(0),
            // (int count, functor, pointers, ..) or (int count, lambda), see CUDALoops.cuh.
            () if POINTERS_THIRD.iter().any(|part| name.contains(part)) => KernelKind::OutputFirst(2),
            () if name.contains("elementwise_kernel") => KernelKind::OutputInLambda,
            () if name.contains("reduce_kernel") => KernelKind::Reduction,
            () => KernelKind::Other,
        };
        Kernel { name: name.to_owned(), kind, recipe: OnceLock::new() }
    }

    fn is_elementwise(&self) -> bool {
        matches!(self.kind, KernelKind::OutputFirst(2) | KernelKind::OutputInLambda)
    }

    /// The size of an output's element: by the recipe, by the name, otherwise that of the largest common type.
    fn element_bytes(&self) -> u64 {
        match self.recipe() {
            Some(Recipe::Elementwise(recipe)) => recipe.element.size(),
            _ if self.name.contains("7complexI") => 16,
            _ if self.name.contains("N3c104HalfE") || self.name.contains("N3c108BFloat16E") => 4,
            _ => compute::largest_parameter(&self.name).unwrap_or(8),
        }
    }

    fn recipe(&self) -> Option<&Recipe> {
        self.recipe.get_or_init(|| Recipe::of(&self.name)).as_ref()
    }
}

/// Kernels by the address of their host stub, or by the handle of a function.
static KERNELS: LazyLock<RwLock<HashMap<u64, Arc<Kernel>>>> = LazyLock::new(Default::default);

fn kernel_of(function: u64) -> Option<Arc<Kernel>> {
    KERNELS.read().unwrap_or_else(|poisoned| poisoned.into_inner()).get(&function).cloned()
}

/// Registers a kernel under a handle.
pub fn register(function: u64, name: &str) {
    KERNELS.write().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(function, Arc::new(Kernel::new(name)));
}

/// What ran last on a stream.
#[derive(Default)]
pub struct LastKernel {
    kernel: Option<Arc<Kernel>>,
    /// The items over which nonzero elements were counted.
    items: Option<u64>,
    /// The count, where the items are known.
    count: Option<u64>,
}

/// The count of nonzero elements that a stream made last, where it is known. It is read once.
pub fn take_count(shadow: &mut Shadow, stream: u64) -> Option<u64> {
    shadow.counters.last_kernels.get_mut(&stream).and_then(|last| last.count.take())
}

/// Name of the last kernel of a stream, and the number of items where it counted them.
pub fn last_kernel(shadow: &Shadow, stream: u64) -> (String, Option<u64>) {
    let last = shadow.counters.last_kernels.get(&stream);
    let name = last.and_then(|last| last.kernel.as_ref()).map_or_else(String::new, |kernel| kernel.name.clone());
    (name, last.and_then(|last| last.items))
}

/// Grid, block, shared memory and stream of a launch that `<<<>>>` pushed.
#[derive(Clone, Copy, Default)]
struct LaunchConfiguration {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u64,
    stream: u64,
}

thread_local! {
    static CONFIGURATION: Cell<LaunchConfiguration> = const { Cell::new(LaunchConfiguration { grid: [1; 3], block: [1; 3], shared: 0, stream: 0 }) };
    static STACK: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

/// Bytes that a thread of a memory-bound kernel moves (four floats in, four out), by an H200's rate: picoseconds.
const PICOS_PER_THREAD: u64 = 8;

fn threads(grid: [u32; 3], block: [u32; 3]) -> u64 {
    grid.iter().chain(&block).map(|&length| u64::from(length.max(1))).fold(1, u64::saturating_mul)
}

/// A launch of any kind.
fn launch(function: u64, grid: [u32; 3], block: [u32; 3], arguments: In<u64>, stream: u64) -> i32 {
    let kernel = kernel_of(function);
    let nanos = streams::KERNEL_FLOOR_NANOS.max(threads(grid, block).saturating_mul(PICOS_PER_THREAD) / 1000);
    let kind = kernel.as_ref().map_or(KernelKind::Other, |kernel| kernel.kind);
    let items = (kind == KernelKind::NonzeroCount).then(|| arguments.get_at(2)).flatten();
    let items = items.and_then(|pointer| In(pointer as *const u32).get()).map(u64::from);
    let mut shadow = state::lock();
    if kernel.as_ref().is_some_and(|kernel| kernel.is_elementwise()) {
        shadow.devices[current::device()].kernels_run();
    }
    let captured = work(&mut shadow, stream, nanos);
    // Nothing is computed while a graph is captured; its launches forget what its kernels write.
    let recipe = kernel.as_ref().and_then(|kernel| kernel.recipe()).filter(|_| !captured);
    let computed = match recipe {
        Some(recipe) if is_host(arguments.0) => compute(&mut shadow, recipe, grid, arguments),
        _ => Computed::No,
    };
    let last = shadow.counters.last_kernels.entry(stream).or_default();
    if kind != KernelKind::SecondPass {
        last.items = items;
        last.count = if let Computed::Count(count) = computed { Some(count) } else { None };
    }
    last.kernel = kernel;
    if computed != Computed::Done && (captured || !shadow.values.is_empty()) && is_host(arguments.0) {
        let bytes = written_bytes(&shadow, stream, arguments);
        forget_outputs(&mut shadow, kind, arguments, bytes, captured.then_some(stream));
    }
    SUCCESS
}

/// How many bytes the last kernel of a stream writes from its output on: the first argument of an element-wise kernel is the
/// number of elements, and a sum along a dimension has its numbers of rows and columns behind its pointers.
fn written_bytes(shadow: &Shadow, stream: u64, arguments: In<u64>) -> u64 {
    let kernel = shadow.counters.last_kernels.get(&stream).and_then(|last| last.kernel.as_ref());
    let counts = match kernel {
        Some(kernel) if kernel.is_elementwise() => 0..1,
        Some(kernel) if kernel.name.contains("scan_innermost_dim") => 2..4,
        Some(kernel) if kernel.name.contains("scan_outer_dim") => 2..5,
        // cub's sums begin with the states of their tiles: 16 bytes each, and 32 more.
        Some(kernel) if kernel.name.contains("DeviceScanInitKernel") => {
            return u64::from(number_at(arguments, 1)).saturating_add(32).saturating_mul(16);
        }
        Some(kernel) if kernel.name.contains("CatArrayBatchedCopy") => {
            return compute::concatenated_bytes(&kernel.name, arguments).unwrap_or(UNKNOWN_LENGTH);
        }
        _ => return UNKNOWN_LENGTH,
    };
    let elements = counts.map(|index| u64::from(number_at(arguments, index))).fold(1, u64::saturating_mul);
    elements.saturating_mul(kernel.map_or(1, |kernel| kernel.element_bytes()))
}

/// An argument that is a count.
fn number_at(arguments: In<u64>, index: usize) -> u32 {
    arguments.get_at(index).and_then(|at| In(at as *const i32).get()).unwrap_or(0).max(0).unsigned_abs()
}

/// Queues work: it takes time. Whether it is part of a capture.
pub fn work(shadow: &mut Shadow, stream: u64, nanos: u64) -> bool {
    shadow.counters.launches += 1;
    shadow.clocks.elapse(streams::LAUNCH_NANOS);
    let captured = shadow.captures.add_node(stream, nanos);
    if !captured {
        shadow.clocks.run(stream, nanos);
    }
    captured
}

/// Work of a library that overwrites `output`. Whether it is part of a capture.
pub fn library_work(stream: u64, name: &'static str, nanos: u64, output: u64) -> bool {
    static NAMES: LazyLock<RwLock<HashMap<&'static str, Arc<Kernel>>>> = LazyLock::new(Default::default);
    let known = NAMES.read().unwrap_or_else(|poisoned| poisoned.into_inner()).get(name).cloned();
    let kernel = known.unwrap_or_else(|| {
        let made = Arc::new(Kernel::new(name));
        NAMES.write().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(name, made.clone());
        made
    });
    let mut shadow = state::lock();
    shadow.devices[current::device()].kernels_run();
    let captured = work(&mut shadow, stream, nanos);
    if captured {
        shadow.captures.note_write(stream, output, UNKNOWN_LENGTH);
    }
    shadow.counters.last_kernels.insert(stream, LastKernel { kernel: Some(kernel), ..LastKernel::default() });
    shadow.values.forget_from(output, UNKNOWN_LENGTH);
    captured
}

/// At most this many arguments, and this many words of all of them, are looked at.
const MAX_ARGUMENTS: usize = 64;
const MAX_WORDS: u64 = 512;

/// Forgets values that the kernel may overwrite, now and, where a stream captures it, with each launch of the graph.
fn forget_outputs(shadow: &mut Shadow, kind: KernelKind, arguments: In<u64>, bytes: u64, capturing: Option<u64>) {
    let outputs = match kind {
        KernelKind::OutputFirst(argument) => {
            let word = arguments.get_at(argument).and_then(|at| In(at as *const u64).get());
            word.filter(|&word| is_device_address(word)).into_iter().collect()
        }
        KernelKind::OutputInLambda => {
            let (_, high) = stack_bounds();
            let start = arguments.get_at(1).unwrap_or(0);
            device_words(start, high.min(start + MAX_WORDS * 8)).map(|(_, word)| word).take(1).collect()
        }
        // The first pointer is the input. Reductions with two results have two outputs, one behind the other.
        KernelKind::Reduction => match *all_device_words(arguments) {
            [_, (at, one), (behind, two), ..] if behind == at + 8 => vec![one, two],
            [_, (_, one), ..] => vec![one],
            _ => Vec::new(),
        },
        _ => all_device_words(arguments).into_iter().map(|(_, word)| word).collect(),
    };
    for output in outputs {
        if let Some(stream) = capturing {
            shadow.captures.note_write(stream, output, bytes);
        }
        shadow.values.forget_from(output, bytes);
    }
}

/// Device addresses among the words of a range of the stack, and where they are.
fn device_words(start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
    (start.next_multiple_of(8)..end.saturating_sub(7))
        .step_by(8)
        .filter_map(|at| Some((at, In(at as *const u64).get()?)))
        .filter(|&(_, word)| is_device_address(word))
}

/// Device addresses among all arguments, in their order, and where they are.
fn all_device_words(arguments: In<u64>) -> Vec<(u64, u64)> {
    let (low, high) = stack_bounds();
    let on_stack = |address: u64| (low..high).contains(&address);
    // The array itself may end with its page; it is read no further.
    let page_end = (arguments.0 as u64 | 4095) + 1;
    let in_page = ((page_end - arguments.0 as u64) / 8) as usize;
    let count = if on_stack(arguments.0 as u64) {
        MAX_ARGUMENTS.min(((high - arguments.0 as u64) / 8) as usize)
    } else {
        MAX_ARGUMENTS.min(in_page)
    };
    let in_order: Vec<u64> = (0..count).map_while(|index| arguments.get_at(index).filter(|&at| on_stack(at))).collect();
    let mut starts = in_order.clone();
    starts.sort_unstable();
    let mut found = Vec::new();
    let mut words = 0;
    for start in &in_order {
        // An argument ends where the next begins. Of the last one, which may be followed by unrelated words, only the
        // beginning is looked at; kernels with one argument get all of theirs in it.
        let last = if in_order.len() == 1 { MAX_WORDS * 8 } else { 256 };
        let next = starts.iter().copied().find(|other| other > start).unwrap_or(start + last);
        let end = next.min(start + MAX_WORDS * 8).min(high);
        found.extend(device_words(*start, end));
        words += (end - start) / 8;
        if words > MAX_WORDS {
            break;
        }
    }
    found
}

/// The stack of the calling thread: from the current frame to its end.
fn stack_bounds() -> (u64, u64) {
    let frame = 0u64;
    let low = &raw const frame as u64;
    let (known_low, known_high) = STACK.get();
    if (known_low..known_high).contains(&low) {
        return (low, known_high);
    }
    let (start, bytes) = thread_stack();
    STACK.set((start, start + bytes));
    (low, start + bytes)
}

/// Start and length of the calling thread's stack.
fn thread_stack() -> (u64, u64) {
    #[repr(C, align(8))]
    struct Attributes([u8; 56]);
    unsafe extern "C" {
        fn pthread_self() -> u64;
        fn pthread_getattr_np(thread: u64, attributes: *mut Attributes) -> i32;
        fn pthread_attr_getstack(attributes: *const Attributes, start: *mut u64, bytes: *mut u64) -> i32;
        fn pthread_attr_destroy(attributes: *mut Attributes) -> i32;
    }
    let mut attributes = Attributes([0; 56]);
    let (mut start, mut bytes) = (0, 0);
    // SAFETY: glibc's pthread_attr_t has 56 bytes on x86-64; it is initialised by the first call and destroyed by the last.
    unsafe {
        if pthread_getattr_np(pthread_self(), &raw mut attributes) == 0 {
            pthread_attr_getstack(&raw const attributes, &raw mut start, &raw mut bytes);
            pthread_attr_destroy(&raw mut attributes);
        }
    }
    (start, bytes)
}

/// `dim3` in two registers: x and y in the first, z in the second.
fn dimensions(xy: u64, z: u64) -> [u32; 3] {
    [xy as u32, (xy >> 32) as u32, z as u32]
}

fn launch_with_configuration(configuration: In<u8>, function: u64, arguments: In<u64>) -> i32 {
    // cudaLaunchConfig_t and CUlaunchConfig: six dimensions, bytes of shared memory, stream.
    let word = |index: usize| configuration.field::<u32>(index * 4).unwrap_or(1);
    let stream = configuration.field::<u64>(32).unwrap_or(0);
    launch(function, [word(0), word(1), word(2)], [word(3), word(4), word(5)], arguments, stream)
}

/// The arguments of `__cudaRegisterFatBinary` are not read: device code is not used.
fn fat_binary() -> u64 {
    crate::arguments::new_handle(0)
}

cuda_functions! {
    fn __cudaRegisterFatBinary(_binary: u64) -> u64 { fat_binary() }
    fn __cudaRegisterFunction(_module: u64, host: u64, _device: u64, name: Text) { register(host, name.get()) }
    fn __cudaPushCallConfiguration(grid_xy: u64, grid_z: u64, block_xy: u64, block_z: u64, shared: u64, stream: u64) -> u32 {
        CONFIGURATION.set(LaunchConfiguration { grid: dimensions(grid_xy, grid_z), block: dimensions(block_xy, block_z), shared, stream });
        0
    }
    fn __cudaPopCallConfiguration(grid: Out<[u32; 3]>, block: Out<[u32; 3]>, shared: Out<u64>, stream: Out<u64>) -> i32 {
        let configuration = CONFIGURATION.get();
        grid.set(configuration.grid);
        block.set(configuration.block);
        shared.set(configuration.shared);
        stream.set(configuration.stream);
        SUCCESS
    }
    fn __cudaGetKernel(kernel: Out<u64>, function: u64) -> i32 { kernel.set(function); SUCCESS }
    fn cudaGetKernel(kernel: Out<u64>, function: u64) -> i32 { kernel.set(function); SUCCESS }
    fn cudaGetFuncBySymbol(kernel: Out<u64>, function: u64) -> i32 { kernel.set(function); SUCCESS }
    // Grid and block take four registers, so the arguments are the sixth, shared memory and stream lie on the stack.
    fn cudaLaunchKernel(function: u64, grid_xy: u64, grid_z: u64, block_xy: u64, block_z: u64, arguments: In<u64>, _shared: u64, stream: u64) -> i32 {
        launch(function, dimensions(grid_xy, grid_z), dimensions(block_xy, block_z), arguments, stream)
    }
    fn __cudaLaunchKernel(function: u64, grid_xy: u64, grid_z: u64, block_xy: u64, block_z: u64, arguments: In<u64>, _shared: u64, stream: u64) -> i32 {
        launch(function, dimensions(grid_xy, grid_z), dimensions(block_xy, block_z), arguments, stream)
    }
    fn cudaLaunchCooperativeKernel(function: u64, grid_xy: u64, grid_z: u64, block_xy: u64, block_z: u64, arguments: In<u64>, _shared: u64, stream: u64) -> i32 {
        launch(function, dimensions(grid_xy, grid_z), dimensions(block_xy, block_z), arguments, stream)
    }
    fn cudaLaunchKernelExC(configuration: In<u8>, function: u64, arguments: In<u64>) -> i32 { launch_with_configuration(configuration, function, arguments) }
    fn cuLaunchKernel(function: u64, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, _shared: u32, stream: u64, arguments: In<u64>, _extra: u64) -> i32 {
        if function == 0 { return INVALID_VALUE; }
        launch(function, [gx, gy, gz], [bx, by, bz], arguments, stream)
    }
    fn cuLaunchCooperativeKernel(function: u64, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, _shared: u32, stream: u64, arguments: In<u64>) -> i32 {
        launch(function, [gx, gy, gz], [bx, by, bz], arguments, stream)
    }
    fn cuLaunchKernelEx(configuration: In<u8>, function: u64, arguments: In<u64>, _extra: u64) -> i32 {
        // CUlaunchConfig: six dimensions, 4 bytes of shared memory, stream.
        launch_with_configuration(configuration, function, arguments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory;

    fn launch_with(name: &str, pointers: &[u64]) {
        let function = 0x77;
        register(function, name);
        let values: [u64; 4] = [pointers[0], pointers[1], 5, 0];
        let at = |index: usize| &raw const values[index] as u64;
        let elementwise = name.contains("elementwise");
        let arguments = if elementwise { [at(2), at(3), at(0), 0] } else { [at(0), at(1), 0, 0] };
        launch(function, [1; 3], [1; 3], In(arguments.as_ptr()), 0);
    }

    #[test]
    fn a_kernel_ends_the_life_of_values_it_may_overwrite() {
        let device = memory::allocate(1 << 20).unwrap();
        let known = |address: u64| state::lock().values.get(address, 4).is_some();
        let keep = |address: u64| state::lock().values.put(address, vec![1; 4]);
        keep(device);
        keep(device + 512);
        launch_with("vectorized_elementwise_kernel", &[device, device + 512]);
        assert_eq!((known(device), known(device + 512)), (false, true), "the first is the output");
        keep(device);
        launch_with("reduce_kernel", &[device, device + 512]);
        assert_eq!((known(device), known(device + 512)), (true, false), "the first is the input");
        launch_with("unknown", &[device, device + 4096]);
        assert!(!known(device));
        // Two values without a gap: a write of unknown length may overwrite both, but not one behind a gap.
        // Addresses on the stack would be taken for arguments, so there are offsets.
        let offsets = [0, 4, 12];
        offsets.iter().for_each(|offset| keep(device + offset));
        launch_with("unknown", &[device, device + 4096]);
        assert_eq!(offsets.map(|offset| known(device + offset)), [false, false, true]);
        memory::free(device);
    }

    #[test]
    fn a_sum_along_a_dimension_overwrites_its_rows_and_columns() {
        let device = memory::allocate(1 << 20).unwrap();
        let known = |address: u64| state::lock().values.get(address, 4).is_some();
        for offset in [0, 512, 1024] {
            state::lock().values.put(device + offset, vec![1; 4]);
        }
        // Two rows of 32 numbers of eight bytes.
        let (pointers, counts) = ([device, device + 4096], [2_u32, 32]);
        let arguments = [
            &raw const pointers[0] as u64,
            &raw const pointers[1] as u64,
            &raw const counts[0] as u64,
            &raw const counts[1] as u64,
        ];
        register(0x78, "tensor_kernel_scan_innermost_dimIl");
        launch(0x78, [1; 3], [1; 3], In(arguments.as_ptr()), 0);
        assert_eq!([0, 512, 1024].map(|offset| known(device + offset)), [false, true, true]);
        let counts = [4_u32, 40];
        let arguments = [
            &raw const pointers[0] as u64,
            &raw const pointers[1] as u64,
            &raw const counts[0] as u64,
            &raw const counts[1] as u64,
        ];
        launch(0x78, [1; 3], [1; 3], In(arguments.as_ptr()), 0);
        assert_eq!([512, 1024].map(|offset| known(device + offset)), [false, false]);
        memory::free(device);
    }

    #[test]
    fn counts_keep_their_items_until_they_are_read() {
        let (items, stream) = (1000u32, 0x99);
        register(0x78, "DeviceReduceKernelNonZeroOp");
        register(0x79, "DeviceReduceSingleTileKernelPiS");
        let arguments = [0, 0, &raw const items as u64];
        launch(0x78, [1; 3], [1; 3], In(arguments.as_ptr()), stream);
        launch(0x79, [1; 3], [1; 3], In(arguments.as_ptr()), stream);
        assert_eq!(last_kernel(&state::lock(), stream).1, Some(1000));
        launch(0x1, [1; 3], [1; 3], In(arguments.as_ptr()), stream);
        assert_eq!(last_kernel(&state::lock(), stream), (String::new(), None));
    }
}
