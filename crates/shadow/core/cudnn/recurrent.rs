//! cuDNN's recurrent networks: their weights, workspace and reserve space.
//!
//! The sizes are sums of buffers that are each rounded up to 32 bytes. Source: 12,020 answers of an H200 with cuDNN 9.19,
//! from which the rules were found (a third of the random ones held out), and 111,882 more that were measured afterwards:
//! random shapes, all cells, fp32, fp64, fp16 and bf16, one and two directions, projections, dropout, padded and packed
//! sequences, all four algorithms. All answers but two agree to the byte; those two asked for tensor cores with
//! conversion (`CUDNN_TENSOR_OP_MATH_ALLOW_CONVERSION`), which PyTorch does not do.
//! `tools/shadow/measure_recurrent.py` measures such answers.

use std::{collections::HashMap, sync::Mutex};

use super::{SUCCESS, legacy::set_shape};
use crate::{
    arguments::{In, Out},
    card::card,
    state,
};

/// `CUDNN_RNN_ALGO_STANDARD` and `CUDNN_RNN_ALGO_PERSIST_STATIC`.
const STANDARD: i32 = 0;
const PERSIST_STATIC: i32 = 1;
/// `CUDNN_LSTM` and `CUDNN_GRU`; the other cells are plain ones with ReLU or tanh.
const LSTM: i32 = 2;
const GRU: i32 = 3;
/// `CUDNN_DATA_BFLOAT16`.
const BFLOAT16: i32 = 9;
/// `CUDNN_TENSOR_OP_MATH_ALLOW_CONVERSION`.
const ALLOW_CONVERSION: i32 = 2;
/// `CUDNN_RNN_PADDED_IO_ENABLED`.
const PADDED: u32 = 1;
/// `CUDNN_FWD_MODE_TRAINING`.
const TRAINING: i32 = 1;

/// A workspace for the matrix products of each layer and direction.
const PRODUCTS: i64 = 8 << 20;
/// Bytes that every space has beside its buffers.
const HEADER: i64 = 256;

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

/// Bytes of buffers that each start at a multiple of 32.
fn buffers(sizes: &[i64]) -> i64 {
    sizes.iter().map(|bytes| (bytes + 31) / 32 * 32).sum()
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

/// The workspace and the reserve space.
impl RecurrentNetwork {
    /// Whether a persistent algorithm is used. In bf16 cuDNN takes the standard one instead.
    fn is_persistent(&self) -> bool {
        self.algorithm != STANDARD && self.data_type != BFLOAT16
    }

    /// Bytes of a hidden vector for each step of each sequence, in one direction.
    fn all_steps(&self, sequences: Sequences) -> i64 {
        sequences.vectors * self.hidden * self.width()
    }

    /// Bytes of a hidden vector for each sequence, in each layer and direction.
    fn one_step(&self, sequences: Sequences) -> i64 {
        self.layers * self.directions * sequences.batch * self.hidden * self.width()
    }

    /// Copies without padding of the input, the output, and the states before and after. The backward pass has them for
    /// the gradients too (`copies` 2).
    fn padded_bytes(&self, sequences: Sequences, copies: i64) -> i64 {
        if self.flags & PADDED == 0 {
            return 0;
        }
        let (width, state) = (self.width(), self.one_step(sequences));
        let input = sequences.vectors * self.input * width;
        let output = sequences.vectors * self.output() * self.directions * width;
        let hidden = state / self.hidden.max(1) * self.output();
        let cells = if self.cell == LSTM { buffers(&[state, state]) } else { 0 };
        copies * (buffers(&[input, output, hidden, hidden]) + cells) + buffers(&[8 * sequences.batch])
    }

    /// What the forward and the backward pass both have: the matrices, and states of one step.
    fn shared_bytes(&self, sequences: Sequences, gates: i64) -> i64 {
        let step = self.one_step(sequences);
        let cell = if self.cell == LSTM { 2 * step } else { 0 };
        let second = if self.directions == 2 { step } else { 0 };
        let states = if self.is_persistent() { [2 * step, cell, second] } else { [gates * step, cell, 2 * second] };
        let projection = if self.is_projected() { self.all_steps(sequences) * self.directions } else { 0 };
        let products = self.layers * self.directions * PRODUCTS;
        HEADER + products + buffers(&[self.matrix_bytes(), projection]) + buffers(&states)
    }

    fn forward_bytes(&self, sequences: Sequences, has_dropout: bool) -> i64 {
        let (steps, gates) = (self.all_steps(sequences), self.gates());
        // One direction is worked off in parts of 256 steps.
        let at_a_time = self.all_steps(Sequences { vectors: sequences.vectors.min(256 * sequences.batch), ..sequences });
        let products = match (self.directions, self.is_persistent()) {
            (1, false) => gates * at_a_time,
            _ => gates * steps * self.directions,
        };
        let persistent = if self.is_persistent() { 4 * gates * steps } else { 0 };
        let between_layers = match (self.directions, has_dropout) {
            (2, _) => 4 * steps,
            (_, true) => steps,
            (_, false) => 0,
        };
        self.shared_bytes(sequences, gates)
            + buffers(&[products, persistent, between_layers])
            + self.padded_bytes(sequences, 1)
    }

    fn backward_bytes(&self, sequences: Sequences) -> i64 {
        let steps = self.all_steps(sequences);
        let both = self.directions * self.directions;
        let input = both * sequences.vectors * self.input.max(self.hidden) * self.width();
        let stacked = if self.layers > 1 { 2 } else { 1 };
        let gradients = match (self.directions, self.is_persistent()) {
            (1, false) => self.all_steps(Sequences { vectors: self.vectors_in_flight(sequences), ..sequences }),
            _ => stacked * steps * self.directions,
        };
        let persistent = if self.is_persistent() { self.persistent_backward_bytes(sequences) } else { 0 };
        self.shared_bytes(sequences, 1)
            + buffers(&[input, gradients])
            + persistent
            + self.padded_bytes(sequences, 2)
    }

    fn persistent_backward_bytes(&self, sequences: Sequences) -> i64 {
        let steps = self.all_steps(sequences);
        let saved = if self.cell == GRU { 6 } else { self.gates() };
        let least = if self.algorithm == PERSIST_STATIC { 2 * self.hidden * (sequences.batch + 2432) } else { 0 };
        buffers(&[least.max(8 * steps), saved * steps])
    }

    /// Vectors whose gradients the backward pass of one direction holds at a time. Layers work on chunks of steps, one
    /// chunk behind the other; small batches have longer chunks.
    fn vectors_in_flight(&self, sequences: Sequences) -> i64 {
        if self.layers == 1 {
            return sequences.vectors;
        }
        let chunk = match (sequences.batch, sequences.steps) {
            (..=1, _) => 32,
            (..=8, _) => 16,
            (..=16, _) | (_, 128..) => 8,
            (..=96, _) => 4,
            _ => 2,
        };
        sequences.vectors.min((chunk * self.layers + chunk.max(8)) * sequences.batch)
    }

    /// Bytes of the workspace. One size serves the forward and the backward pass of a training step.
    fn work_bytes(&self, sequences: Sequences, mode: i32, has_dropout: bool) -> i64 {
        let forward = self.forward_bytes(sequences, has_dropout);
        if mode == TRAINING { forward.max(self.backward_bytes(sequences)) } else { forward }
    }

    /// Bytes that the forward pass keeps for the backward pass: gates, cells, outputs between layers, and a bit of
    /// dropout for each of their elements.
    fn reserve_bytes(&self, sequences: Sequences, mode: i32, has_dropout: bool) -> i64 {
        if mode != TRAINING {
            return 0;
        }
        let layer = self.all_steps(sequences) * self.directions;
        let (all, between) = (self.layers * layer, (self.layers - 1) * layer);
        let kept = match self.cell {
            LSTM if self.is_projected() => {
                let outputs = all / self.hidden.max(1) * self.output();
                buffers(&[4 * all, all, all, outputs, between])
            }
            LSTM => buffers(&[4 * all, all, between]),
            GRU => buffers(&[6 * all, between]),
            _ => buffers(&[all, between]),
        };
        let bits = sequences.steps * sequences.batch * self.output() * self.directions;
        let masks = (self.layers - 1) * self.directions * buffers(&[(bits + 7) / 8]);
        HEADER + kept + if has_dropout { masks } else { 0 }
    }

    /// Whether sizes of such networks were compared with a GPU's.
    fn is_measured(&self) -> bool {
        card().cudnn / 10_000 == 9 && card().major == 9 && self.math != ALLOW_CONVERSION
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
