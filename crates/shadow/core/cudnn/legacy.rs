//! cuDNN's older calls: handles, versions, shapes of tensors, and sizes of dropout and normalisation.

use std::{collections::HashMap, ptr::null, sync::Mutex};

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
    /// Empty: the last dimension is contiguous, then the one before.
    strides: Vec<i32>,
}

impl TensorShape {
    fn length(&self, dimension: usize) -> i32 {
        self.dimensions.get(dimension).copied().unwrap_or(1)
    }

    /// Whether the channels lie next to each other. Strides of dimensions of length 1 do not matter.
    fn is_channels_last(&self) -> bool {
        let mut dense = 1;
        let outwards = std::iter::once(1).chain((2..self.dimensions.len()).rev()).chain(std::iter::once(0));
        outwards.into_iter().all(|dimension| {
            let length = self.length(dimension);
            let fits = length == 1 || self.strides.get(dimension) == Some(&dense);
            dense *= length;
            fits
        })
    }
}

static TENSORS: Mutex<Option<HashMap<u64, TensorShape>>> = Mutex::new(None);

fn with_tensors<T>(use_them: impl FnOnce(&mut HashMap<u64, TensorShape>) -> T) -> T {
    use_them(state::locked(&TENSORS).get_or_insert_default())
}

/// What a program may ask back of a tensor or filter.
pub(super) fn set_shape(descriptor: u64, data_type: i32, count: i32, dimensions: In<i32>) -> i32 {
    set_strided(descriptor, data_type, count, dimensions, In(null()))
}

fn set_strided(descriptor: u64, data_type: i32, count: i32, dimensions: In<i32>, strides: In<i32>) -> i32 {
    let all = |numbers: In<i32>| (0..count.max(0) as usize).filter_map(|index| numbers.get_at(index)).collect();
    let shape = TensorShape { data_type, dimensions: all(dimensions), strides: all(strides) };
    with_tensors(|tensors| tensors.insert(descriptor, shape));
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
    let mut dense: i32 = shape.dimensions.iter().product();
    for index in 0..wanted.max(0) as usize {
        let length = shape.length(index);
        dense /= length.max(1);
        dimensions.set_at(index, length);
        let stride = shape.strides.get(index).copied().unwrap_or(dense.max(1));
        strides.into_iter().for_each(|strides| strides.set_at(index, stride));
    }
    SUCCESS
}

/// `CUDNN_BATCHNORM_SPATIAL_PERSISTENT`, which PyTorch uses for channels last in training.
const PERSISTENT: i32 = 2;
/// `CUDNN_BATCHNORM_OPS_BN`: no activation and no addition, as PyTorch asks.
const NORMALISATION_ALONE: i32 = 0;
/// `CUDNN_DATA_FLOAT` and `CUDNN_DATA_DOUBLE`.
const FLOAT: i32 = 0;
const DOUBLE: i32 = 1;

#[derive(Clone, Copy)]
enum Pass {
    Forward,
    Backward,
}

/// Workspace of a batch normalisation in training, or `None` where it was not measured.
///
/// Persistent kernels over channels-last tensors sum up tiles of rows and channels: each tile has two float32 sums per
/// channel, in the forward pass with a counter, and each column of tiles has a counter. All other kernels need nothing.
/// Exact for each of 175,534 shapes on an H200 (cuDNN 9.19; fp32, fp16, bf16, fp64, 4 and 5 dimensions). Answers were the
/// same with 66 and 104 of the 132 multiprocessors, so they do not follow from their number.
fn normalisation_workspace(pass: Pass, mode: i32, operations: i32, shape: &TensorShape) -> Option<u64> {
    if operations != NORMALISATION_ALONE || card().cudnn < 90_000 {
        return None;
    }
    if mode != PERSISTENT || shape.data_type == DOUBLE || !shape.is_channels_last() {
        return Some(0);
    }
    let elements: u64 = shape.dimensions.iter().map(|&length| length.max(0) as u64).product();
    let channels = shape.length(1).max(1) as u64;
    let (tile_channels, more_rows) = match channels {
        1..=3 => (4, 4),
        _ if channels.is_multiple_of(4) => (64, 1),
        _ => (16, 1),
    };
    let (rows, counter, fixed) = match pass {
        Pass::Forward => (if shape.data_type == FLOAT { 64 } else { 160 }, 1, 1072),
        Pass::Backward => (96, 0, 1056),
    };
    let columns = channels.div_ceil(tile_channels);
    let tiles = (elements / channels).div_ceil(rows * more_rows) * columns;
    Some(tiles * 4 * (2 * tile_channels + counter) + fixed + 4 * columns)
}

fn normalisation_size(pass: Pass, mode: i32, operations: i32, x: u64, bytes: Out<u64>) -> i32 {
    let shape = with_tensors(|tensors| tensors.get(&x).cloned()).unwrap_or_default();
    match normalisation_workspace(pass, mode, operations, &shape) {
        Some(size) => bytes.set(size),
        None => return unknown_size(bytes),
    }
    SUCCESS
}

/// What the forward pass keeps for the backward pass: nothing without an activation (measured as the workspaces).
fn normalisation_reserve(operations: i32, bytes: Out<u64>) -> i32 {
    if operations != NORMALISATION_ALONE || card().cudnn < 90_000 {
        return unknown_size(bytes);
    }
    bytes.set(0);
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
    fn cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(_handle: u64, mode: i32, operations: i32, x: u64, _z: u64, _y: u64, _scale: u64, _activation: u64, bytes: Out<u64>) -> i32 { normalisation_size(Pass::Forward, mode, operations, x, bytes) }
    fn cudnnGetBatchNormalizationBackwardExWorkspaceSize(_handle: u64, mode: i32, operations: i32, x: u64, _y: u64, _dy: u64, _dz: u64, _dx: u64, _scale: u64, _activation: u64, bytes: Out<u64>) -> i32 { normalisation_size(Pass::Backward, mode, operations, x, bytes) }
    fn cudnnGetBatchNormalizationTrainingExReserveSpaceSize(_handle: u64, _mode: i32, operations: i32, _activation: u64, _x: u64, bytes: Out<u64>) -> i32 { normalisation_reserve(operations, bytes) }
    fn cudnnSetTensorNdDescriptor(descriptor: u64, data_type: i32, count: i32, dimensions: In<i32>, strides: In<i32>) -> i32 { set_strided(descriptor, data_type, count, dimensions, strides) }
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

    fn strides(channels_last: bool, dimensions: &[i32]) -> Vec<i32> {
        let (inner, count) = (dimensions[2..].iter().product::<i32>(), dimensions.len());
        let step = if channels_last { dimensions[1] } else { 1 };
        let position = |index: usize| dimensions[index + 1..].iter().product::<i32>() * step;
        let mut strides = vec![dimensions[1] * inner, if channels_last { 1 } else { inner }];
        strides.extend((2..count).map(position));
        strides
    }

    /// Mode, data type, channels last, dimensions, workspaces forward and backward.
    type Measured = (i32, i32, bool, &'static [i32], u64, u64);

    /// On an H200 with cuDNN 9.19.
    #[test]
    fn measured_normalisations() {
        let rows: [Measured; 30] = [
            (2, 0, true, &[48, 3, 32, 32], 7_988, 5_156),
            (2, 0, true, &[203, 1, 128, 128], 468_788, 278_244),
            (2, 0, true, &[1, 16, 28, 28], 7_784, 5_668),
            (2, 0, true, &[101, 192, 160, 160], 62_540_284, 41_371_692),
            (2, 0, true, &[2, 369, 2, 2], 4_336, 4_224),
            (2, 0, true, &[128, 262, 1, 1], 5_628, 5_476),
            (2, 2, true, &[256, 1, 128, 128], 237_020, 350_596),
            (2, 2, true, &[48, 3, 7, 7], 1_220, 1_284),
            (2, 2, true, &[20, 8, 16, 16], 17_588, 28_708),
            (2, 2, true, &[128, 48, 80, 32], 1_057_844, 1_749_028),
            (2, 2, true, &[32, 146, 56, 56], 830_072, 1_339_976),
            (2, 2, true, &[8, 135, 14, 14], 12_988, 20_676),
            (2, 9, true, &[43, 1, 4, 4], 1_148, 1_124),
            (2, 9, true, &[48, 1, 28, 28], 3_200, 4_196),
            (2, 9, true, &[48, 24, 121, 2], 38_744, 63_012),
            (2, 9, true, &[48, 4, 64, 80], 793_652, 1_311_780),
            (2, 9, true, &[64, 82, 7, 7], 16_936, 26_424),
            (2, 9, true, &[2, 151, 112, 112], 208_352, 336_456),
            (2, 0, true, &[20, 16, 4, 80, 80], 4_129_076, 2_732_068),
            (2, 0, true, &[156, 64, 8, 28, 28], 7_889_684, 5_219_364),
            (2, 2, true, &[32, 64, 16, 64, 160], 16_909_364, 27_963_428),
            // One channel or one position: both layouts are the same.
            (2, 0, false, &[23, 512, 1, 1], 5_232, 5_184),
            (2, 2, false, &[256, 3, 1, 1], 1_112, 1_092),
            (2, 0, false, &[20, 1, 14, 14], 1_652, 1_412),
            (2, 2, false, &[256, 1, 32, 252], 117_212, 173_092),
            (2, 2, false, &[16, 32, 56, 32], 0, 0),
            (2, 1, true, &[2, 24, 112, 112], 0, 0),
            (1, 0, true, &[256, 48, 16, 2, 2], 0, 0),
            (1, 2, false, &[64, 100, 93, 93], 0, 0),
            (0, 0, false, &[291, 512, 1, 1], 0, 0),
        ];
        for (mode, data_type, channels_last, dimensions, forward, backward) in rows {
            let (strides, x) = (strides(channels_last, dimensions), 0x56);
            let (dimensions, count) = (In(dimensions.as_ptr()), dimensions.len() as i32);
            cudnnSetTensorNdDescriptor(x, data_type, count, dimensions, In(strides.as_ptr()));
            let mut sizes = [9; 3];
            let [first, second, third] = sizes.each_mut().map(|size| Out(&raw mut *size));
            cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(0, mode, 0, x, 0, x, 0, 0, first);
            cudnnGetBatchNormalizationBackwardExWorkspaceSize(0, mode, 0, x, 0, x, 0, x, 0, 0, second);
            cudnnGetBatchNormalizationTrainingExReserveSpaceSize(0, mode, 0, 0, x, third);
            assert_eq!(sizes, [forward, backward, 0], "{mode} {data_type} {strides:?}");
        }
    }

    #[test]
    fn a_normalisation_with_an_activation_is_not_known() {
        let shape = TensorShape { data_type: 2, dimensions: vec![8, 64, 4, 4], strides: vec![1024, 1, 256, 64] };
        assert!(normalisation_workspace(Pass::Forward, PERSISTENT, NORMALISATION_ALONE, &shape) > Some(0));
        assert_eq!(normalisation_workspace(Pass::Forward, PERSISTENT, 1, &shape), None);
    }
}
