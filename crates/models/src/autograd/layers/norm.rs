//! Layer norm and RMS norm over the numbers of a token, and batch norm over all images.

use super::{pointwise::Factor, scratch};
use crate::autograd::{
    graph::{GradientEdge, Gradients, GraphOperation, MOST_EDGES, Tensor, Variable, WeightId},
    machine::TensorMachine,
    saving::UnpackedTensors,
    techniques::NumberFormat,
};
use oomph_base::Work;
use oomph_trace::Category;

/// Scale and shift of a norm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormWeights {
    pub(crate) scale: WeightId,
    pub(crate) shift: WeightId,
}

/// A norm of every row by one kernel: `torch.nn.LayerNorm`, or `torch.nn.RMSNorm` (`_fused_rms_norm`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowNorm {
    pub(crate) kind: RowNormKind,
    pub(crate) scale: WeightId,
    /// Nothing where the norm has no bias.
    pub(crate) shift: Option<WeightId>,
}

/// What a norm makes of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowNormKind {
    /// Less its mean, divided by its deviation.
    Layer,
    /// Divided by the root of the mean of its squares.
    Rms,
}

impl From<NormWeights> for RowNorm {
    fn from(weights: NormWeights) -> RowNorm {
        RowNorm { kind: RowNormKind::Layer, scale: weights.scale, shift: Some(weights.shift) }
    }
}

/// Batch norm: scale and shift, and the running statistics, which have no gradient.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchNorm {
    pub(crate) weights: NormWeights,
    pub(crate) running: [WeightId; 2],
    pub(crate) channels: u32,
}

/// How an RMS norm that is made of plain operators multiplies its scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RmsStyle {
    /// After the rows are narrowed again, as Llama does.
    ScaleLast,
    /// In single precision, one plus the weight, as Gemma does.
    ScaleInSingle,
}

impl TensorMachine {
    /// Normalises every row. Saves its input, and the mean and deviation of each row; an RMS norm has no mean.
    pub(crate) fn layer_norm(&mut self, input: Variable, norm: impl Into<RowNorm>) -> Variable {
        let RowNorm { kind, scale, shift } = norm.into();
        let trainable = self.weights[scale as usize].trainable;
        let records = self.records(trainable || input.needs_gradient());
        if records {
            if let Some(shift) = shift {
                self.save_weight(shift, false);
            }
            self.save(input.tensor);
            self.save_weight(scale, false);
        }
        self.wait_for_ranks(input.tensor);
        let bytes = self.bytes(input.tensor);
        let output = self.alloc(bytes, Category::Activation);
        let rows = bytes / (self.weights[scale as usize].elements * input.number.bytes());
        // Statistics are in single precision, whatever the rows are in.
        let of_rows = rows * NumberFormat::Single.bytes();
        let mean = (kind == RowNormKind::Layer).then(|| self.alloc(of_rows, Category::Activation));
        let deviation = self.alloc(of_rows, Category::Activation);
        self.elementwise(2 * bytes, [input.tensor, output]);
        self.save_statistics(records, mean.into_iter().chain([deviation]));
        let to = |weight| if trainable { GradientEdge::Weight(weight) } else { GradientEdge::None };
        let edges = [input.edge(), to(scale), shift.map_or(GradientEdge::None, to)];
        self.output(output, input.number, records, GraphOperation::LayerNorm { rows }, &edges)
    }

    /// Divides every row by the root of the mean of its squares, in single precision and operator by operator.
    pub(crate) fn rms_norm(&mut self, input: Variable, scale: WeightId, style: RmsStyle) -> Variable {
        let columns = self.weights[scale as usize].elements;
        let wide = self.in_format(input, NumberFormat::Single);
        let squares = self.power(wide);
        let variance = self.row_mean(squares, columns);
        self.release(squares.tensor);
        let shifted = self.shift(variance);
        if style == RmsStyle::ScaleInSingle {
            self.release(variance.tensor);
        }
        let inverse = self.inverse_root(shifted);
        self.release(shifted.tensor);
        let normed = self.multiply(wide, Factor::per_row(inverse), Category::Activation);
        self.release_all([inverse.tensor, wide.tensor]);
        match style {
            RmsStyle::ScaleLast => {
                let narrow = self.in_format(normed, input.number);
                let weight = self.weight_factor(scale);
                let output = self.multiply(weight, narrow, Category::Activation);
                self.release_all([narrow.tensor, normed.tensor, variance.tensor]);
                output
            }
            RmsStyle::ScaleInSingle => {
                let factor = self.one_plus_weight(scale);
                let scaled = self.multiply(normed, Factor::for_rows(factor), Category::Temporary);
                self.release_all([factor.tensor, normed.tensor]);
                let output = self.in_format(scaled, input.number);
                self.release(scaled.tensor);
                output
            }
        }
    }

    /// A weight in single precision, plus one.
    fn one_plus_weight(&mut self, id: WeightId) -> Variable {
        let tensor = self.weight_on_device(id);
        let number = self.plan.precision.of_weights();
        let trainable = self.weights[id as usize].trainable;
        let to = if trainable { GradientEdge::Weight(id) } else { GradientEdge::None };
        let part = Some(self.weight_bytes(id, tensor));
        let weight = Variable { part, ..Variable::constant(tensor, number) };
        if number == NumberFormat::Single {
            return self.shift_of(weight, to);
        }
        let wide = self.cast(weight, NumberFormat::Single, to, Category::Temporary);
        let shifted = self.shift(wide);
        self.release(wide.tensor);
        shifted
    }

    fn save_statistics(&mut self, records: bool, statistics: impl IntoIterator<Item = Tensor>) {
        for statistic in statistics {
            if records {
                self.save(statistic);
            }
            self.release(statistic);
        }
    }

    /// The gradients of input, scale and shift.
    pub(crate) fn layer_norm_backward(&mut self, saved: &UnpackedTensors, rows: u64, incoming: Tensor) -> Gradients {
        let bytes = self.bytes(incoming);
        // A shift is saved before the input.
        let input = saved.operand(usize::from(saved.edges[2].is_needed()), incoming);
        let [to_input, to_scale, to_shift] = saved.edges;
        let mut gradients = [None; MOST_EDGES];
        if to_input.is_needed() {
            let of_input = self.temporary(bytes);
            self.elementwise(3 * bytes, [incoming, input, of_input]);
            gradients[0] = Some(of_input);
        }
        if to_scale.is_needed() {
            let width = u64::from(self.plan.shape.width);
            let of_weight = self.elements_along(to_scale) * self.plan.precision.of_weights().bytes();
            let mut of_weights =
                [to_scale, to_shift].map(|edge| edge.is_needed().then(|| self.gradient_along(edge, of_weight)));
            self.work(Work::Reduction { bytes: 2 * bytes }, [incoming, input]);
            if let Some(rows) = scratch::norm_partial_rows(rows, width) {
                self.sum_partial_rows(rows, [to_scale, to_shift], &mut of_weights);
            }
            [gradients[1], gradients[2]] = of_weights;
        }
        gradients
    }

    /// Sums of this many rows of partial sums take the place of the gradients
    /// (`LaunchGammaBetaBackwardCUDAKernel`).
    fn sum_partial_rows(&mut self, rows: u64, edges: [GradientEdge; 2], gradients: &mut [Option<Tensor>; 2]) {
        let partial = gradients.map(|gradient| gradient.map(|gradient| self.temporary(rows * self.bytes(gradient))));
        for ((gradient, partial), edge) in gradients.iter_mut().zip(partial).zip(edges) {
            if let (Some(before), Some(partial)) = (*gradient, partial) {
                let sum = self.gradient_along(edge, self.bytes(before));
                self.sum_rows(rows, self.elements_along(edge));
                self.work(Work::Reduction { bytes: self.bytes(partial) }, [partial, sum]);
                self.release(before);
                *gradient = Some(sum);
            }
        }
        for partial in partial.into_iter().flatten() {
            self.release(partial);
        }
    }

    /// Normalises every channel over all images.
    pub(crate) fn batch_norm(&mut self, input: Variable, norm: BatchNorm) -> Variable {
        let records = self.records(true);
        if records {
            self.save(input.tensor);
            for weight in [norm.weights.scale, norm.running[0], norm.running[1]] {
                self.save_weight(weight, false);
            }
        }
        let bytes = self.bytes(input.tensor);
        let output = self.alloc(bytes, Category::Activation);
        let of_channels = u64::from(norm.channels) * NumberFormat::Single.bytes();
        let [mean, deviation] = [(); 2].map(|()| self.alloc(of_channels, Category::Activation));
        self.work(Work::Reduction { bytes }, [input.tensor, mean, deviation]);
        self.elementwise(2 * bytes, [input.tensor, output]);
        self.save_statistics(records, [mean, deviation]);
        let [scale, shift] = [norm.weights.scale, norm.weights.shift].map(GradientEdge::Weight);
        self.output(output, input.number, records, GraphOperation::BatchNorm, &[input.edge(), scale, shift])
    }

    /// The gradients of input, scale and shift.
    pub(crate) fn batch_norm_backward(&mut self, saved: &UnpackedTensors, incoming: Tensor) -> Gradients {
        let input = saved.operand(0, incoming);
        let bytes = self.bytes(incoming);
        let of_input = self.temporary(bytes);
        let [of_scale, of_shift] = [saved.edges[1], saved.edges[2]].map(|edge| {
            let of_weight = self.elements_along(edge) * NumberFormat::Single.bytes();
            self.gradient_along(edge, of_weight)
        });
        self.work(Work::Reduction { bytes: 2 * bytes }, [incoming, input, of_scale, of_shift]);
        self.elementwise(3 * bytes, [incoming, input, of_input]);
        [Some(of_input), Some(of_scale), Some(of_shift)]
    }
}
