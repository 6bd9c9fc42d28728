//! cuDNN's older calls: handles, versions, shapes of tensors, and sizes of dropout and normalisation.

use std::{collections::HashMap, sync::Mutex};

use super::SUCCESS;
use crate::{
    arguments::{In, Out, copy_text, new_handle},
    card::card,
    state, streams,
};

fn set_stream(handle: u64, stream: u64) -> i32 {
    streams::set_library_stream(handle, stream);
    SUCCESS
}

/// Major, minor and patch. cuDNN 9 counts 9.19.0 as 91900, cuDNN 8 counts 8.9.2 as 8902.
fn property(number: i32) -> i32 {
    let version = card().cudnn;
    let parts = if version >= 90_000 {
        [version / 10_000, version / 100 % 100, version % 100]
    } else {
        [version / 1000, version / 100 % 10, version % 100]
    };
    parts[number.clamp(0, 2) as usize] as i32
}

/// A size that is not known: 0, and said so.
fn unknown_size(bytes: Out<u64>) -> i32 {
    state::lock().counters.assume("cudnn_workspace_unknown");
    bytes.set(0);
    SUCCESS
}

/// A tensor or filter descriptor, as far as programs ask it back.
#[derive(Clone, Default)]
struct TensorShape {
    data_type: i32,
    dimensions: Vec<i32>,
}

static TENSORS: Mutex<Option<HashMap<u64, TensorShape>>> = Mutex::new(None);

fn with_tensors<T>(use_them: impl FnOnce(&mut HashMap<u64, TensorShape>) -> T) -> T {
    use_them(state::locked(&TENSORS).get_or_insert_default())
}

/// What a program may ask back of a tensor or filter.
pub(super) fn set_shape(descriptor: u64, data_type: i32, count: i32, dimensions: In<i32>) -> i32 {
    let dimensions = (0..count.max(0) as usize).filter_map(|index| dimensions.get_at(index)).collect();
    with_tensors(|tensors| tensors.insert(descriptor, TensorShape { data_type, dimensions }));
    SUCCESS
}

fn get_shape(
    descriptor: u64,
    wanted: i32,
    data_type: Out<i32>,
    count: Out<i32>,
    dimensions: Out<i32>,
    strides: Option<Out<i32>>,
) -> i32 {
    let shape = with_tensors(|tensors| tensors.get(&descriptor).cloned()).unwrap_or_default();
    data_type.set(shape.data_type);
    count.set(shape.dimensions.len() as i32);
    let mut stride: i32 = shape.dimensions.iter().product();
    for index in 0..wanted.max(0) as usize {
        let length = shape.dimensions.get(index).copied().unwrap_or(1);
        stride /= length.max(1);
        dimensions.set_at(index, length);
        strides.into_iter().for_each(|strides| strides.set_at(index, stride.max(1)));
    }
    SUCCESS
}

cuda_functions! {
    fn cudnnCreate(handle: Out<u64>) -> i32 { handle.set(new_handle(6)); SUCCESS }
    fn cudnnSetStream(handle: u64, stream: u64) -> i32 { set_stream(handle, stream) }
    fn cudnnGetStream(handle: u64, stream: Out<u64>) -> i32 { stream.set(streams::of_library(handle)); SUCCESS }
    fn cudnnGetVersion() -> u64 { card().cudnn as u64 }
    fn cudnnGetCudartVersion() -> u64 { card().cuda as u64 }
    fn cudnnGetMaxDeviceVersion() -> u64 { (card().major * 100 + card().minor * 10) as u64 }
    fn cudnnGetProperty(number: i32, value: Out<i32>) -> i32 { value.set(property(number)); SUCCESS }
    fn cudnnGetErrorString(code: i32) -> *const u8 { if code == SUCCESS { c"CUDNN_STATUS_SUCCESS" } else { c"CUDNN_STATUS_BAD_PARAM" }.as_ptr().cast() }
    fn cudnnGetLastErrorString(buffer: Out<u8>, length: u64) { copy_text("", buffer, length as usize) }
    // States of a generator, 48 bytes for each of 1024 threads on every multiprocessor (H200, cuDNN 9.19: 6,488,064 bytes).
    fn cudnnDropoutGetStatesSize(_handle: u64, bytes: Out<u64>) -> i32 {
        bytes.set(card().multiprocessors as u64 * 1024 * 48);
        SUCCESS
    }
    fn cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(_handle: u64, _mode: i32, _operations: i32, _x: u64, _z: u64, _y: u64, _scale: u64, _activation: u64, bytes: Out<u64>) -> i32 { unknown_size(bytes) }
    fn cudnnGetBatchNormalizationBackwardExWorkspaceSize(_handle: u64, _mode: i32, _operations: i32, _x: u64, _y: u64, _dy: u64, _dz: u64, _dx: u64, _scale: u64, _activation: u64, bytes: Out<u64>) -> i32 { unknown_size(bytes) }
    fn cudnnGetBatchNormalizationTrainingExReserveSpaceSize(_handle: u64, _mode: i32, _operations: i32, _activation: u64, _x: u64, bytes: Out<u64>) -> i32 { unknown_size(bytes) }
    fn cudnnSetTensorNdDescriptor(descriptor: u64, data_type: i32, count: i32, dimensions: In<i32>, _strides: u64) -> i32 { set_shape(descriptor, data_type, count, dimensions) }
    fn cudnnGetTensorNdDescriptor(descriptor: u64, wanted: i32, data_type: Out<i32>, count: Out<i32>, dimensions: Out<i32>, strides: Out<i32>) -> i32 {
        get_shape(descriptor, wanted, data_type, count, dimensions, Some(strides))
    }
    fn cudnnSetFilterNdDescriptor(descriptor: u64, data_type: i32, _format: i32, count: i32, dimensions: In<i32>) -> i32 { set_shape(descriptor, data_type, count, dimensions) }
    fn cudnnGetFilterNdDescriptor(descriptor: u64, wanted: i32, data_type: Out<i32>, format: Out<i32>, count: Out<i32>, dimensions: Out<i32>) -> i32 {
        format.set(0);
        get_shape(descriptor, wanted, data_type, count, dimensions, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_give_their_shape_back() {
        let (dimensions, mut back, mut strides, mut count, mut data_type) = ([2, 3, 4], [0; 3], [0; 3], 0, 9);
        set_shape(0x55, 2, 3, In(dimensions.as_ptr()));
        get_shape(
            0x55,
            3,
            Out(&raw mut data_type),
            Out(&raw mut count),
            Out(back.as_mut_ptr()),
            Some(Out(strides.as_mut_ptr())),
        );
        assert_eq!((back, strides, count, data_type), ([2, 3, 4], [12, 4, 1], 3, 2));
    }
}
