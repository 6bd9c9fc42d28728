//! How much workspace a plan needs, and how long it takes.

use super::backend::{Descriptor, Shared};
use crate::{state, streams};

/// Types of operations (`cudnnBackendDescriptorType_t`).
const CONVOLUTION_FORWARD: i32 = 10;
const CONVOLUTION_BACKWARD_FILTER: i32 = 11;
const CONVOLUTION_BACKWARD_DATA: i32 = 12;
const TENSOR: i32 = 17;
/// Attributes of tensors.
const DATA_TYPE: i32 = 901;
const DIMENSIONS: i32 = 902;
const STRIDES: i32 = 903;

/// Plans of attention need 256 bytes beside the buffers that cuDNN's frontend asks for: fp32 gradients of queries and
/// softmax sums are part of its own count (H200, cuDNN 9.19, forward and backward; recordings of `swiglu`).
const ATTENTION_BYTES: i64 = 256;

/// Bytes of an element (`cudnnDataType_t`).
fn width(data_type: i32) -> i64 {
    match data_type {
        1 | 10 => 8,
        2 | 9 => 2,
        3 | 5 | 7 | 8 | 12..=16 => 1,
        _ => 4,
    }
}

/// The tensors of an operation: input, filter and output of a convolution.
fn tensors(operation: &Descriptor) -> Vec<Shared> {
    operation
        .all_descriptors()
        .into_iter()
        .map(|(_, descriptor)| descriptor)
        .filter(|descriptor| descriptor.kind == TENSOR)
        .collect()
}

fn elements(tensor: &Descriptor) -> i64 {
    tensor.numbers(DIMENSIONS).iter().product()
}

fn bytes(tensor: &Descriptor) -> i64 {
    elements(tensor) * width(tensor.small_number(DATA_TYPE).unwrap_or(0))
}

/// Whether the channels of a tensor lie next to each other.
fn is_channels_last(tensor: &Descriptor) -> bool {
    let (dimensions, strides) = (tensor.numbers(DIMENSIONS), tensor.numbers(STRIDES));
    dimensions.len() < 2 || dimensions[1] == 1 || strides.get(1) == Some(&1)
}

fn is_convolution(operation: &Descriptor) -> bool {
    matches!(operation.kind, CONVOLUTION_FORWARD | CONVOLUTION_BACKWARD_FILTER | CONVOLUTION_BACKWARD_DATA)
}

/// What cuDNN adds to the copies: 147 bytes for 125 of the 230 forward and data-gradient plans of `unet` on an H200 (cuDNN
/// 9.19), 16 bytes for 74 of them.
const COPY_OVERHEAD: i64 = 147;
/// Kernels for tensor cores take channels in groups of this many.
const CHANNEL_GROUP: i64 = 8;

/// Workspace of a convolution in 16-bit types: kernels for tensor cores want channels last, so tensors in another order
/// are copied, and the copies are the workspace. Convolutions to a few channels take other kernels, which need next to
/// none; those from a few channels (images) do so in the forward pass. What gradients of filters need beside the copies
/// (partial sums, up to 7 MiB in `unet`) depends on undocumented choices and is not counted.
fn convolution_workspace(operation: &Descriptor) -> i64 {
    let tensors = tensors(operation);
    let is_half = tensors.iter().all(|tensor| width(tensor.small_number(DATA_TYPE).unwrap_or(0)) == 2);
    let copied: i64 = tensors.iter().filter(|tensor| !is_channels_last(tensor)).map(|tensor| bytes(tensor)).sum();
<<<<<<< HEAD
    // Attributes come in the order of their numbers, and the filter's is the lowest: output channels, input channels.
    let filter = tensors.first().map_or_else(Vec::new, |tensor| tensor.numbers(DIMENSIONS));
    let few = |index: usize| filter.get(index).is_some_and(|&channels| channels < CHANNEL_GROUP);
=======
    let few_channels = tensors
        .iter()
        .any(|tensor| tensor.numbers(DIMENSIONS).get(1).is_some_and(|&channels| channels < CHANNEL_GROUP));
>>>>>>> 55124cd (rehearse: Ctrl-C keeps the recording, tested)
    match () {
        () if !is_half || copied == 0 || few(0) => 0,
        () if few(1) && operation.kind != CONVOLUTION_BACKWARD_FILTER => 0,
        () => copied + COPY_OVERHEAD,
    }
}

/// Workspace of a graph of operations.
pub fn of_operations(operations: &[Shared]) -> i64 {
    if let Some(convolution) = operations.iter().find(|operation| is_convolution(operation)) {
        state::lock().counters.assume("cudnn_convolution_workspace_by_rule");
        return convolution_workspace(convolution);
    }
    match operations.len() {
        0 => 0,
        // One operation: normalisation, resampling.
        1 if !is_attention(operations) => {
            state::lock().counters.assume("cudnn_workspace_unknown");
            0
        }
        _ => ATTENTION_BYTES,
    }
}

/// Attention is a graph with products, or one operation of its own (SDPA descriptors came with cuDNN 9.10).
fn is_attention(operations: &[Shared]) -> bool {
    operations.iter().any(|operation| tensors(operation).iter().any(|tensor| tensor.numbers(DIMENSIONS).len() == 4))
        && operations.len() > 1
}

/// Operations per nanosecond of an H200 in 16-bit types, as far as convolutions reach it.
const OPERATIONS_PER_NANO: i64 = 400_000;
const BYTES_PER_NANO: i64 = 3_000;

/// How long a plan takes: by its operations for convolutions, by its bytes otherwise.
pub fn nanos_of_operations(operations: &[Shared]) -> u64 {
    let nanos = operations.iter().map(|operation| {
        let tensors = tensors(operation);
        let moved: i64 = tensors.iter().map(|tensor| bytes(tensor)).sum();
        let computed = match is_convolution(operation) && tensors.len() >= 3 {
            true => {
                let filter = tensors.iter().map(|tensor| elements(tensor)).min().unwrap_or(0);
                let largest = tensors.iter().map(|tensor| elements(tensor)).max().unwrap_or(0);
                2 * filter.saturating_mul(largest) / 64 / OPERATIONS_PER_NANO
            }
            false => 0,
        };
        (moved / BYTES_PER_NANO).max(computed)
    });
    streams::KERNEL_FLOOR_NANOS + nanos.sum::<i64>().max(0) as u64
}
