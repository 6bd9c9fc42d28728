//! cuDNN's recurrent networks: their descriptors and weights. `sizes` has the rules of their workspace.

mod sizes;

use std::{collections::HashMap, sync::Mutex};

use super::{SUCCESS, legacy::set_shape};
use crate::{
    arguments::{In, Out},
    state,
};

/// `CUDNN_LSTM` and `CUDNN_GRU`; the other cells are plain ones with ReLU or tanh.
const LSTM: i32 = 2;
const GRU: i32 = 3;
/// `CUDNN_DATA_BFLOAT16`.
const BFLOAT16: i32 = 9;

/// A recurrent network.
#[derive(Clone, Copy, Default)]
struct RecurrentNetwork {
    algorithm: i32,
    cell: i32,
    bias: i32,
    directions: i64,
    data_type: i32,
    math: i32,
    input: i64,
    hidden: i64,
    projected: i64,
    layers: i64,
    /// The descriptor of its dropout.
    dropout: u64,
    flags: u32,
}

/// A batch of sequences.
#[derive(Clone, Copy, Default)]
struct Sequences {
    /// Length of the longest.
    steps: i64,
    batch: i64,
    /// Sum of all lengths.
    vectors: i64,
}

#[derive(Default)]
struct Descriptors {
    networks: HashMap<u64, RecurrentNetwork>,
    sequences: HashMap<u64, Sequences>,
    /// The probability of each dropout descriptor.
    dropouts: HashMap<u64, f32>,
}

static DESCRIPTORS: Mutex<Option<Descriptors>> = Mutex::new(None);

fn with_descriptors<T>(use_them: impl FnOnce(&mut Descriptors) -> T) -> T {
    use_them(state::locked(&DESCRIPTORS).get_or_insert_default())
}

/// The weights.
impl RecurrentNetwork {
    /// Matrices of a layer that read its input, and as many that read its last state.
    fn gates(&self) -> i64 {
        match self.cell {
            LSTM => 4,
            GRU => 3,
            _ => 1,
        }
    }

    fn matrices(&self) -> i64 {
        2 * self.gates()
    }

    fn width(&self) -> i64 {
        match self.data_type {
            1 => 8,
            2 | BFLOAT16 => 2,
            _ => 4,
        }
    }

    fn is_projected(&self) -> bool {
        self.projected > 0 && self.projected != self.hidden
    }

    /// Elements of the output of a step in one direction.
    fn output(&self) -> i64 {
        if self.is_projected() { self.projected } else { self.hidden }
    }

    /// Rows and columns of a matrix of a pseudo layer (layer times directions).
    fn matrix(&self, pseudo_layer: i64, matrix: i64) -> (i64, i64) {
        if matrix == self.matrices() {
            return (self.projected, self.hidden);
        }
        let from_input = matrix < self.gates();
        let columns = match (from_input, pseudo_layer / self.directions) {
            (true, 0) => self.input,
            (true, _) => self.output() * self.directions,
            (false, _) => self.output(),
        };
        (self.hidden, columns)
    }

    fn matrices_with_projection(&self) -> i64 {
        self.matrices() + i64::from(self.is_projected())
    }

    /// One or two biases per matrix pair (`cudnnRNNBiasMode_t`: none, input, both, recurrent).
    fn has_bias(&self, matrix: i64) -> bool {
        match self.bias {
            0 => false,
            1 => matrix < self.gates(),
            2 => matrix < self.matrices(),
            _ => (self.gates()..self.matrices()).contains(&matrix),
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

    fn weight_bytes(&self) -> i64 {
        self.offset(self.layers * self.directions, 0, true)
    }

    fn matrix_bytes(&self) -> i64 {
        self.offset(0, 0, true)
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

fn set_sequences(descriptor: u64, steps: i32, batch: i32, lengths: In<i32>) -> i32 {
    let length = |sequence| i64::from(lengths.get_at(sequence).unwrap_or(steps));
    let vectors = (0..batch.max(0) as usize).map(length).sum();
    let sequences = Sequences { steps: steps.into(), batch: batch.into(), vectors };
    with_descriptors(|all| all.sequences.insert(descriptor, sequences));
    SUCCESS
}

fn set_dropout(descriptor: u64, probability: f32) -> i32 {
    with_descriptors(|all| all.dropouts.insert(descriptor, probability));
    SUCCESS
}

fn temporary_space(descriptor: u64, mode: i32, data: u64, work: Out<u64>, reserve: Out<u64>) -> i32 {
    let network = network(descriptor);
    let (sequences, probability) = with_descriptors(|all| {
        let sequences = all.sequences.get(&data).copied().unwrap_or_default();
        (sequences, all.dropouts.get(&network.dropout).copied().unwrap_or(0.0))
    });
    if !network.is_measured() {
        state::lock().counters.assume("cudnn_recurrent_space_by_rule");
    }
    work.set(network.work_bytes(sequences, mode, probability > 0.0).max(0) as u64);
    reserve.set(network.reserve_bytes(sequences, mode, probability > 0.0).max(0) as u64);
    SUCCESS
}

cuda_functions! {
    fn cudnnSetDropoutDescriptor(descriptor: u64, _handle: u64, probability: f32, _states: u64, _bytes: u64, _seed: u64) -> i32 { set_dropout(descriptor, probability) }
    fn cudnnRestoreDropoutDescriptor(descriptor: u64, _handle: u64, probability: f32, _states: u64, _bytes: u64, _seed: u64) -> i32 { set_dropout(descriptor, probability) }
    fn cudnnDestroyDropoutDescriptor(descriptor: u64) -> i32 { with_descriptors(|all| all.dropouts.remove(&descriptor)); SUCCESS }
    fn cudnnSetRNNDescriptor_v8(descriptor: u64, algorithm: i32, cell: i32, bias: i32, direction: i32, _input_mode: i32, data_type: i32, _precision: i32, math: i32, input: i32, hidden: i32, projected: i32, layers: i32, dropout: u64, flags: u32) -> i32 {
        let directions = if direction == 1 { 2 } else { 1 };
        let (input, hidden, projected, layers) = (input.into(), hidden.into(), projected.into(), layers.into());
        let network = RecurrentNetwork { algorithm, cell, bias, directions, data_type, math, input, hidden, projected, layers, dropout, flags };
        with_descriptors(|all| all.networks.insert(descriptor, network));
        SUCCESS
    }
    fn cudnnDestroyRNNDescriptor(descriptor: u64) -> i32 { with_descriptors(|all| all.networks.remove(&descriptor)); SUCCESS }
    fn cudnnSetRNNDataDescriptor(descriptor: u64, _data_type: i32, _layout: i32, steps: i32, batch: i32, _vector: i32, lengths: In<i32>, _padding: u64) -> i32 { set_sequences(descriptor, steps, batch, lengths) }
    fn cudnnDestroyRNNDataDescriptor(descriptor: u64) -> i32 { with_descriptors(|all| all.sequences.remove(&descriptor)); SUCCESS }
    fn cudnnGetRNNWeightSpaceSize(_handle: u64, descriptor: u64, bytes: Out<u64>) -> i32 { bytes.set(network(descriptor).weight_bytes().max(0) as u64); SUCCESS }
    fn cudnnGetRNNTempSpaceSizes(_handle: u64, descriptor: u64, mode: i32, data: u64, work: Out<u64>, reserve: Out<u64>) -> i32 { temporary_space(descriptor, mode, data, work, reserve) }
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
            cell: LSTM,
            bias: 2,
            directions: 2,
            input: 10,
            hidden: 20,
            layers: 2,
            ..Default::default()
        };
        // Two directions: 4 gates x (input + hidden) columns, then the second layer reads both directions; two biases each.
        let expected = 2 * 4 * 20 * (10 + 20) + 2 * 4 * 20 * (40 + 20) + 4 * 8 * 20;
        assert_eq!(lstm.weight_bytes(), expected * 4);
        assert_eq!(lstm.offset(0, 1, false), 20 * 10 * 4);
        assert_eq!(lstm.offset(0, 0, true), (expected - 4 * 8 * 20) * 4);
    }

    /// Work and reserve space in training, asked as PyTorch asks: LSTM in fp32, 512 inputs, 768 hidden, two layers.
    fn asked(dropout: u64, batch: i32, lengths: In<i32>) -> (u64, u64) {
        let (network, data, mut work, mut reserve) = (0x71, 0x72, 0, 0);
        cudnnSetRNNDescriptor_v8(network, 0, LSTM, 2, 0, 0, 0, 0, 0, 512, 768, 768, 2, dropout, 1);
        cudnnSetRNNDataDescriptor(data, 0, 0, 128, batch, 512, lengths, 0);
        cudnnGetRNNTempSpaceSizes(0, network, 1, data, Out(&raw mut work), Out(&raw mut reserve));
        (work, reserve)
    }

    #[test]
    fn dropout_is_that_of_the_descriptor_when_sizes_are_asked() {
        let full = [128; 32];
        cudnnSetDropoutDescriptor(0x73, 0, 0.0, 0, 0, 0);
        cudnnRestoreDropoutDescriptor(0x74, 0, 0.5, 0, 0, 0);
        // Measured, as in `sizes`.
        assert_eq!(asked(0x73, 32, In(full.as_ptr())), (124_649_984, 138_412_288));
        assert_eq!(asked(0x74, 32, In(full.as_ptr())), (137_232_896, 138_805_504));
        cudnnSetDropoutDescriptor(0x74, 0, 0.0, 0, 0, 0);
        assert_eq!(asked(0x74, 32, In(full.as_ptr())), (124_649_984, 138_412_288));
        let shorter = [100; 32];
        let (work, reserve) = asked(0x74, 32, In(shorter.as_ptr()));
        assert_eq!(reserve, 256 + 11 * 3200 * 768 * 4);
        assert!(work < 124_649_984);
    }
}
