//! cuDNN's older calls: handles, versions, and sizes of recurrent networks, dropout and normalisation.

use std::{collections::HashMap, sync::Mutex};

use super::SUCCESS;
use crate::{
    arguments::{In, Out, copy_text, new_handle},
    card::card,
    properties, state, streams,
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

/// A recurrent network.
#[derive(Clone, Copy, Default)]
struct RecurrentNetwork {
    cell: i32,
    bias: i32,
    directions: i64,
    data_type: i32,
    input: i64,
    hidden: i64,
    projected: i64,
    layers: i64,
}

#[derive(Default)]
struct Descriptors {
    tensors: HashMap<u64, TensorShape>,
    networks: HashMap<u64, RecurrentNetwork>,
    /// Longest sequence and batch of a data descriptor.
    sequences: HashMap<u64, (i64, i64)>,
}

static DESCRIPTORS: Mutex<Option<Descriptors>> = Mutex::new(None);

fn with_descriptors<T>(use_them: impl FnOnce(&mut Descriptors) -> T) -> T {
    use_them(state::locked(&DESCRIPTORS).get_or_insert_default())
}

fn set_shape(descriptor: u64, data_type: i32, count: i32, dimensions: In<i32>) -> i32 {
    let dimensions = (0..count.max(0) as usize).filter_map(|index| dimensions.get_at(index)).collect();
    with_descriptors(|all| all.tensors.insert(descriptor, TensorShape { data_type, dimensions }));
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
    let shape = with_descriptors(|all| all.tensors.get(&descriptor).cloned()).unwrap_or_default();
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

impl RecurrentNetwork {
    /// Matrices of a layer, half for the input and half for the recurrence: RNN (ReLU, tanh), LSTM, GRU.
    fn matrices(&self) -> i64 {
        match self.cell {
            2 => 8,
            3 => 6,
            _ => 2,
        }
    }

    fn width(&self) -> i64 {
        match self.data_type {
            1 => 8,
            2 | 9 => 2,
            _ => 4,
        }
    }

    /// Rows and columns of a matrix of a pseudo layer (layer times directions).
    fn matrix(&self, pseudo_layer: i64, matrix: i64) -> (i64, i64) {
        let output = if self.projected > 0 { self.projected } else { self.hidden };
        if matrix == self.matrices() {
            return (self.projected, self.hidden);
        }
        let from_input = matrix < self.matrices() / 2;
        let columns = match (from_input, pseudo_layer / self.directions) {
            (true, 0) => self.input,
            (true, _) => output * self.directions,
            (false, _) => output,
        };
        (self.hidden, columns)
    }

    fn matrices_with_projection(&self) -> i64 {
        self.matrices() + i64::from(self.projected > 0 && self.projected != self.hidden)
    }

    /// One or two biases per matrix pair (`cudnnRNNBiasMode_t`: none, input, both, recurrent).
    fn has_bias(&self, matrix: i64) -> bool {
        match self.bias {
            0 => false,
            1 => matrix < self.matrices() / 2,
            2 => matrix < self.matrices(),
            _ => (self.matrices() / 2..self.matrices()).contains(&matrix),
        }
    }

    /// All matrices lie first, then all biases.
    fn offset(&self, pseudo_layer: i64, matrix: i64, of_bias: bool) -> i64 {
        let mut elements = 0;
        let all = |layer: i64| (0..self.matrices_with_projection()).map(move |matrix| (layer, matrix));
        let positions: Vec<(i64, i64)> = (0..self.layers * self.directions).flat_map(all).collect();
        for &(layer, other) in &positions {
            if !of_bias && (layer, other) == (pseudo_layer, matrix) {
                return elements * self.width();
            }
            let (rows, columns) = self.matrix(layer, other);
            elements += rows * columns;
        }
        for &(layer, other) in &positions {
            if (layer, other) == (pseudo_layer, matrix) {
                break;
            }
            elements += if self.has_bias(other) { self.hidden } else { 0 };
        }
        elements * self.width()
    }

    fn bytes(&self) -> i64 {
        self.offset(self.layers * self.directions, 0, true)
    }

    /// Gates and outputs of every step that the backward pass needs. cuDNN's own count is not documented; this is what
    /// the arithmetic needs at least.
    fn reserve_bytes(&self, steps: i64, batch: i64) -> i64 {
        (self.matrices() / 2 + 2) * self.hidden * self.directions * self.layers * steps * batch * self.width()
    }
}

fn network(descriptor: u64) -> RecurrentNetwork {
    with_descriptors(|all| all.networks.get(&descriptor).copied()).unwrap_or_default()
}

/// The address of a matrix and its bias in a weight space.
fn weight_params(
    descriptor: u64,
    layer: i32,
    space: u64,
    matrix: i32,
    shapes: [u64; 2],
    addresses: [Out<u64>; 2],
) -> i32 {
    let network = network(descriptor);
    let (layer, matrix) = (i64::from(layer), i64::from(matrix));
    let exists = matrix < network.matrices_with_projection() && network.layers > 0;
    let (rows, columns) = if exists { network.matrix(layer, matrix) } else { (0, 0) };
    let dimensions = [1, rows as i32, columns as i32];
    set_shape(shapes[0], network.data_type, 3, In(dimensions.as_ptr()));
    addresses[0].set(if exists { space + network.offset(layer, matrix, false) as u64 } else { 0 });
    let has_bias = exists && network.has_bias(matrix);
    let dimensions = [1, if has_bias { network.hidden as i32 } else { 0 }, 1];
    set_shape(shapes[1], network.data_type, 3, In(dimensions.as_ptr()));
    addresses[1].set(if has_bias { space + network.offset(layer, matrix, true) as u64 } else { 0 });
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
    // States of a generator of 48 bytes for each thread that a device runs at a time.
    fn cudnnDropoutGetStatesSize(_handle: u64, bytes: Out<u64>) -> i32 {
        bytes.set((card().multiprocessors * properties::limits().threads_per_multiprocessor) as u64 * 48);
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
    fn cudnnSetRNNDescriptor_v8(descriptor: u64, _algorithm: i32, cell: i32, bias: i32, direction: i32, _input_mode: i32, data_type: i32, _precision: i32, _math: i32, input: i32, hidden: i32, projected: i32, layers: i32, _dropout: u64, _flags: u32) -> i32 {
        let directions = if direction == 1 { 2 } else { 1 };
        let (input, hidden, projected, layers) = (input.into(), hidden.into(), projected.into(), layers.into());
        let network = RecurrentNetwork { cell, bias, directions, data_type, input, hidden, projected, layers };
        with_descriptors(|all| all.networks.insert(descriptor, network));
        SUCCESS
    }
    fn cudnnSetRNNDataDescriptor(descriptor: u64, _data_type: i32, _layout: i32, steps: i32, batch: i32, _vector: i32, _lengths: u64, _padding: u64) -> i32 {
        with_descriptors(|all| all.sequences.insert(descriptor, (steps.into(), batch.into())));
        SUCCESS
    }
    fn cudnnGetRNNWeightSpaceSize(_handle: u64, descriptor: u64, bytes: Out<u64>) -> i32 { bytes.set(network(descriptor).bytes().max(0) as u64); SUCCESS }
    fn cudnnGetRNNTempSpaceSizes(_handle: u64, descriptor: u64, mode: i32, data: u64, work: Out<u64>, reserve: Out<u64>) -> i32 {
        let (steps, batch) = with_descriptors(|all| all.sequences.get(&data).copied()).unwrap_or_default();
        let bytes = network(descriptor).reserve_bytes(steps, batch).max(0) as u64;
        state::lock().counters.assume("cudnn_recurrent_space_by_rule");
        work.set(bytes);
        // CUDNN_FWD_MODE_TRAINING
        reserve.set(if mode == 1 { bytes } else { 0 });
        SUCCESS
    }
    fn cudnnGetRNNWeightParams(_handle: u64, descriptor: u64, layer: i32, _bytes: u64, space: u64, matrix: i32, matrix_shape: u64, matrix_address: Out<u64>, bias_shape: u64, bias_address: Out<u64>) -> i32 {
        weight_params(descriptor, layer, space, matrix, [matrix_shape, bias_shape], [matrix_address, bias_address])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_of_a_network_add_up() {
        let lstm = RecurrentNetwork {
            cell: 2,
            bias: 2,
            directions: 2,
            data_type: 0,
            input: 10,
            hidden: 20,
            projected: 0,
            layers: 2,
        };
        // Two directions: 4 gates x (input + hidden) columns, then the second layer reads both directions; two biases each.
        let expected = 2 * 4 * 20 * (10 + 20) + 2 * 4 * 20 * (40 + 20) + 4 * 8 * 20;
        assert_eq!(lstm.bytes(), expected * 4);
        assert_eq!(lstm.offset(0, 1, false), 20 * 10 * 4);
        assert_eq!(lstm.offset(0, 0, true), (expected - 4 * 8 * 20) * 4);
    }

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
