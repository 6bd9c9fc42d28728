//! How much workspace and reserve space cuDNN's recurrent networks need.
//!
//! The sizes are sums of buffers that are each rounded up to 32 bytes. Source: 123,902 answers of an H200 with cuDNN 9.19
//! (`tools/shadow/measure_recurrent.py`) for random shapes of all cells, data types, algorithms, one and two directions,
//! projections, dropout, padded and packed sequences. The rules of the standard algorithm were found on 7,700 of them,
//! those of the persistent ones on a few hundred. All but two agree to the byte, among them 99,634 of the standard algorithm
//! that no rule was found on. The two asked for tensor cores with conversion, which PyTorch does not.

use super::{BFLOAT16, GRU, LSTM, RecurrentNetwork, Sequences};
use crate::card::card;

/// `CUDNN_RNN_ALGO_STANDARD` and `CUDNN_RNN_ALGO_PERSIST_STATIC`.
const STANDARD: i32 = 0;
const PERSIST_STATIC: i32 = 1;
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

/// Bytes of buffers that each start at a multiple of 32.
fn buffers(sizes: &[i64]) -> i64 {
    sizes.iter().map(|bytes| (bytes + 31) / 32 * 32).sum()
}

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
        let at_a_time =
            self.all_steps(Sequences { vectors: sequences.vectors.min(256 * sequences.batch), ..sequences });
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
        self.shared_bytes(sequences, 1) + buffers(&[input, gradients]) + persistent + self.padded_bytes(sequences, 2)
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
    pub(super) fn work_bytes(&self, sequences: Sequences, mode: i32, has_dropout: bool) -> i64 {
        let forward = self.forward_bytes(sequences, has_dropout);
        if mode == TRAINING { forward.max(self.backward_bytes(sequences)) } else { forward }
    }

    /// Bytes that the forward pass keeps for the backward pass: gates, cells, outputs between layers, and a bit of
    /// dropout for each of their elements.
    pub(super) fn reserve_bytes(&self, sequences: Sequences, mode: i32, has_dropout: bool) -> i64 {
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
    pub(super) fn is_measured(&self) -> bool {
        card().cudnn / 10_000 == 9 && card().major == 9 && self.math != ALLOW_CONVERSION
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Algorithm, cell, bias mode, directions, data type, input, hidden, projected, layers, flags.
    type Network = [i64; 10];

    /// Network; longest length, batch and sum of lengths; mode; dropout; work, reserve and weight bytes of an H200.
    type Measurement = (Network, [i64; 3], i32, bool, [i64; 3]);

    const MEASURED: &[Measurement] = &[
        // LSTM in fp32, inference.
        ([0, 2, 2, 1, 0, 512, 768, 768, 2, 1], [128, 32, 4_096], 0, false, [124_649_984, 0, 34_652_160]),
        // The same in training.
        ([0, 2, 2, 1, 0, 512, 768, 768, 2, 1], [128, 32, 4_096], 1, false, [124_649_984, 138_412_288, 34_652_160]),
        // Many steps.
        ([0, 2, 2, 1, 0, 512, 768, 768, 2, 1], [1000, 32, 32_000], 1, false, [481_886_720, 1_081_344_256, 34_652_160]),
        // Two directions with dropout.
        ([0, 2, 0, 2, 0, 384, 200, 200, 2, 1], [1, 2, 2], 1, true, [41_246_752, 35_712, 7_577_600]),
        // Projection with dropout, packed sequences.
        ([0, 2, 0, 1, 0, 2048, 16, 8, 4, 0], [100, 20, 1_011], 1, true, [42_488_256, 1_882_720, 540_672]),
        // GRU in fp64, two directions, packed.
        ([0, 3, 2, 2, 1, 1128, 3, 3, 3, 0], [567, 5, 1_427], 1, false, [102_145_536, 1_370_176, 166_320]),
        // ReLU in fp16 with dropout, packed, a large batch.
        ([0, 0, 2, 1, 2, 512, 128, 128, 3, 0], [60, 128, 3_877], 1, true, [29_988_096, 5_208_576, 296_448]),
        // tanh in bf16 with dropout, a batch of one.
        ([0, 1, 2, 1, 9, 8, 512, 512, 2, 1], [330, 1, 330], 1, true, [19_491_424, 1_035_136, 1_585_152]),
        // The algorithm for small hidden sizes: LSTM in fp32.
        ([3, 2, 2, 1, 0, 384, 128, 128, 2, 1], [623, 262, 163_226], 1, false, [2_110_864_704, 919_289_088, 1_581_056]),
        // GRU in fp16, two directions, dropout.
        ([3, 3, 2, 2, 2, 1301, 130, 130, 3, 1], [556, 1, 556], 1, true, [65_652_704, 5_854_976, 3_458_520]),
        // LSTM in bf16.
        ([3, 2, 2, 1, 9, 640, 5, 5, 2, 1], [96, 102, 9_792], 1, false, [54_636_416, 1_077_376, 26_360]),
        // tanh in inference with dropout.
        ([3, 1, 2, 1, 0, 2048, 320, 320, 4, 1], [114, 22, 2_508], 0, true, [82_511_296, 0, 5_498_880]),
        // The persistent algorithm: LSTM in fp16.
        ([1, 2, 2, 1, 2, 512, 512, 512, 1, 1], [100, 20, 2_000], 1, false, [57_803_168, 10_240_256, 4_202_496]),
        // ReLU, few steps.
        ([1, 0, 2, 1, 2, 896, 512, 512, 1, 1], [4, 24, 96], 1, false, [13_402_560, 98_560, 1_443_840]),
    ];

    fn network(numbers: Network) -> RecurrentNetwork {
        let [algorithm, cell, bias, directions, data_type, input, hidden, projected, layers, flags] = numbers;
        let (algorithm, cell, bias, data_type) = (algorithm as i32, cell as i32, bias as i32, data_type as i32);
        let (math, dropout, flags) = (0, 0, flags as u32);
        RecurrentNetwork {
            algorithm,
            cell,
            bias,
            directions,
            data_type,
            math,
            input,
            hidden,
            projected,
            layers,
            dropout,
            flags,
        }
    }

    #[test]
    fn sizes_are_those_of_an_h200() {
        for &(numbers, [steps, batch, vectors], mode, has_dropout, expected) in MEASURED {
            let (network, sequences) = (network(numbers), Sequences { steps, batch, vectors });
            let work = network.work_bytes(sequences, mode, has_dropout);
            let reserve = network.reserve_bytes(sequences, mode, has_dropout);
            assert_eq!([work, reserve, network.weight_bytes()], expected, "{numbers:?}, {steps} steps, batch {batch}");
        }
    }

    #[test]
    fn products_with_conversion_are_not_measured() {
        let network = network(MEASURED[0].0);
        assert!(network.is_measured());
        assert!(!RecurrentNetwork { math: ALLOW_CONVERSION, ..network }.is_measured());
    }
}
