//! How much workspace a plan needs, and how long it takes.

use super::{
    backend::{Descriptor, Shared},
    convolutions::{Convolution, ConvolutionOperation, workspace_bytes},
};
use crate::{state, streams};

/// Types of operations (`cudnnBackendDescriptorType_t`).
pub const CONVOLUTION_FORWARD: i32 = 10;
const CONVOLUTION_BACKWARD_FILTER: i32 = 11;
const CONVOLUTION_BACKWARD_DATA: i32 = 12;
const ATTENTION_FORWARD: i32 = 41;
const ATTENTION_BACKWARD: i32 = 43;
const TENSOR: i32 = 17;
/// Attributes of tensors.
const DATA_TYPE: i32 = 901;
const DIMENSIONS: i32 = 902;
const STRIDES: i32 = 903;
/// `CUDNN_DATA_BFLOAT16`.
const BFLOAT16: i32 = 9;

/// Plans of attention need 256 bytes beside the buffers that cuDNN's frontend asks for: fp32 gradients of queries and
/// softmax sums are part of its own count (H200, cuDNN 9.19; recordings of transformers, and of attention over feature
/// maps, where it is one operation).
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

pub fn is_convolution(operation: &Descriptor) -> bool {
    matches!(operation.kind, CONVOLUTION_FORWARD | CONVOLUTION_BACKWARD_FILTER | CONVOLUTION_BACKWARD_DATA)
}

/// Attributes of the descriptor of a convolution (`CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR`).
const CONVOLUTION: i32 = 1;
const DILATIONS: i32 = 102;
const FILTER_STRIDES: i32 = 103;
const PRE_PADDINGS: i32 = 105;

/// What the rule for workspaces needs to know of a convolution; `None` where its description is not complete.
fn convolution(operation: &Descriptor) -> Option<Convolution> {
    // Attributes come in the order of their numbers: filter, input, output for all three operations.
    let tensors = tensors(operation);
    let [filter, input, ..] = tensors.as_slice() else { return None };
    let description = operation.all_descriptors().into_iter().map(|(_, descriptor)| descriptor);
    let description = description.into_iter().find(|descriptor| descriptor.kind == CONVOLUTION)?;
    let number = |numbers: &[i64], index: usize| numbers.get(index).and_then(|&number| u64::try_from(number).ok());
    let axes = |numbers: Vec<i64>, skipped: usize, absent: u64| {
        std::array::from_fn(|axis| number(&numbers, skipped + axis).unwrap_or(absent))
    };
    let (input_sizes, filter_sizes) = (input.numbers(DIMENSIONS), filter.numbers(DIMENSIONS));
    let channels = number(&input_sizes, 1)?;
    Some(Convolution {
        operation: match operation.kind {
            CONVOLUTION_FORWARD => ConvolutionOperation::Forward,
            CONVOLUTION_BACKWARD_DATA => ConvolutionOperation::Data,
            _ => ConvolutionOperation::Filter,
        },
        half: width(input.small_number(DATA_TYPE).unwrap_or(0)) == 2,
        channels_last: tensors.iter().all(|tensor| is_channels_last(tensor)),
        batch: number(&input_sizes, 0)?,
        channels,
        filters: number(&filter_sizes, 0)?,
        groups: channels / number(&filter_sizes, 1)?.max(1),
        input: axes(input_sizes, 2, 1),
        kernel: axes(filter_sizes, 2, 1),
        stride: axes(description.numbers(FILTER_STRIDES), 0, 1),
        padding: axes(description.numbers(PRE_PADDINGS), 0, 0),
        dilation: axes(description.numbers(DILATIONS), 0, 1),
    })
}

/// The convolution of a graph, and whether its elements are bfloat16.
pub fn convolution_of(operations: &[Shared]) -> Option<(Convolution, bool)> {
    let operation = operations.iter().find(|operation| is_convolution(operation))?;
    let bfloat16 = tensors(operation).first()?.small_number(DATA_TYPE) == Some(BFLOAT16);
    Some((convolution(operation)?, bfloat16))
}

/// Workspace of a graph of operations.
pub fn of_operations(operations: &[Shared]) -> i64 {
    if let Some(convolution) = operations.iter().find(|operation| is_convolution(operation)) {
        state::lock().counters.assume("cudnn_convolution_workspace_by_rule");
        return self::convolution(convolution).map_or(0, |convolution| workspace_bytes(&convolution) as i64);
    }
    // Attention is a graph with products, or one operation of its own.
    match operations {
        [] => 0,
        // Normalisation, resampling.
        [operation] if !matches!(operation.kind, ATTENTION_FORWARD | ATTENTION_BACKWARD) => {
            state::lock().counters.assume("cudnn_workspace_unknown");
            0
        }
        _ => ATTENTION_BYTES,
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_may_be_one_operation() {
        let operation = |kind| [Descriptor::with(kind, [])];
        assert_eq!(of_operations(&operation(ATTENTION_FORWARD)), ATTENTION_BYTES);
        assert_eq!(of_operations(&operation(29)), 0, "a normalisation");
    }
}
