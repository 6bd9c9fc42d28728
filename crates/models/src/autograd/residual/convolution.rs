//! Convolutions without bias, as `torch.nn.Conv2d` makes them through cuDNN.

use super::{
    super::{
        graph::{Edge, MOST_EDGES, Node, Operation, Origin, Value},
        machine::{Machine, Tensor},
        precision::Number,
        saving::Form,
        weights::WeightId,
    },
    kernels::{self, Direction, Extent},
};
use oomph_base::{Dtype, ProductRole, Work};
use oomph_trace::Category;

/// A convolution of square images with a square filter, padded so that only the stride makes images smaller.
#[derive(Clone, Copy, Debug)]
pub(super) struct Convolution {
    pub(super) weight: WeightId,
    pub(super) inputs: u32,
    pub(super) outputs: u32,
    pub(super) kernel: u32,
    pub(super) stride: u32,
    /// Rows, and columns, of an image that comes in.
    pub(super) side: u32,
    /// Which kernels cuDNN picks for it.
    pub(super) kernels: u8,
}

/// A convolution that was made, for its backward.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Convolved {
    convolution: Convolution,
    number: Number,
}

/// The places of what it saves, in the order in which PyTorch names them.
const SAVED_INPUT: usize = 0;
const SAVED_WEIGHT: usize = 1;

impl Convolution {
    /// Rows, and columns, of an image that goes out.
    pub(super) fn output_side(&self) -> u32 {
        self.side.div_ceil(self.stride)
    }

    /// Numbers in the filter.
    pub(super) fn filter(&self) -> u64 {
        u64::from(self.inputs) * u64::from(self.outputs) * u64::from(self.kernel * self.kernel)
    }

    fn extent(&self, images: u32) -> Extent {
        let images = u64::from(images);
        let pixels = |side: u32| u64::from(side) * u64::from(side);
        Extent {
            images,
            inputs: self.inputs.into(),
            input: images * u64::from(self.inputs) * pixels(self.side),
            output: images * u64::from(self.outputs) * pixels(self.output_side()),
            filter: self.filter(),
        }
    }

    /// As a product: a row for every pixel that goes out.
    fn work(&self, extent: &Extent, direction: Direction, number: Number) -> Work {
        let pixels = (extent.output / u64::from(self.outputs)) as u32;
        let patch = self.inputs * self.kernel * self.kernel;
        let [m, n, k] = match direction {
            Direction::Forward => [pixels, self.outputs, patch],
            Direction::InputGradient => [pixels, patch, self.outputs],
            Direction::FilterGradient => [self.outputs, patch, pixels],
        };
        // PyTorch lets cuDNN round single precision to tf32 where nobody forbids it.
        let dtype = if number == Number::Single { Dtype::Tf32 } else { Dtype::Bf16 };
        Work::Gemm { m, n, k, batch: 1, dtype, role: ProductRole::Output }
    }
}

impl Machine {
    /// Every image with every filter.
    pub(super) fn convolve(&mut self, images: Value, convolution: Convolution) -> Value {
        let (weight, _) = self.product_weight(convolution.weight);
        let input = self.cast_for_product(images);
        let number = input.number;
        let records = self.records(true);
        let first_saved = self.begin_saving();
        if records {
            self.save(input.tensor, Form::Dense);
            if Some(weight.tensor) == self.weights[convolution.weight as usize].tensor {
                self.save_weight(convolution.weight, false);
            } else {
                self.save(weight.tensor, Form::Dense);
            }
        }
        let extent = convolution.extent(self.graph.sequences);
        let output = self.alloc(extent.output * number.bytes(), Category::Activation);
        let convolved = Convolved { convolution, number };
        self.run_kernel(&convolved, Direction::Forward, [input.tensor, weight.tensor, output]);
        let origin = if records {
            let to_weight = match weight.origin {
                Origin::Recorded(place) => Edge::Value(place),
                Origin::Constant | Origin::Recomputed => Edge::Weight(convolution.weight),
            };
            let edges = [input.origin.edge(), to_weight, Edge::Nowhere];
            self.record(Operation::Convolution(convolved), first_saved, edges)
        } else {
            Origin::Constant
        };
        if input.tensor != images.tensor {
            self.release(input.tensor);
        }
        Value { tensor: output, number, origin }
    }

    /// The gradients of images and filter.
    pub(in super::super) fn convolution_backward(
        &mut self,
        node: &Node,
        convolved: Convolved,
        incoming: Tensor,
    ) -> [Option<Tensor>; MOST_EDGES] {
        let saved = self.unpack(node);
        let (input, weight) = (saved.operand(SAVED_INPUT, incoming), saved.operand(SAVED_WEIGHT, incoming));
        let extent = convolved.convolution.extent(self.graph.sequences);
        let [to_input, to_weight, _] = node.edges;
        let mut gradients = [None; MOST_EDGES];
        if to_input != Edge::Nowhere {
            let gradient = self.temporary(extent.input * convolved.number.bytes());
            self.run_kernel(&convolved, Direction::InputGradient, [incoming, weight, gradient]);
            gradients[0] = Some(gradient);
        }
        let gradient = self.gradient_along(to_weight, extent.filter * convolved.number.bytes());
        self.run_kernel(&convolved, Direction::FilterGradient, [incoming, input, gradient]);
        gradients[1] = Some(gradient);
        self.drop_unpacked(&saved);
        gradients
    }

    fn run_kernel(&mut self, convolved: &Convolved, direction: Direction, operands: [Tensor; 3]) {
        let Convolved { convolution, number } = *convolved;
        let extent = convolution.extent(self.graph.sequences);
        let work = convolution.work(&extent, direction, number);
        if self.kernel_search.begins(convolution.kernels, direction) {
            self.try_all_kernels(&convolution, &extent, number, work, operands);
        }
        let bytes = kernels::scratch_bytes(convolution.kernels, direction, &extent, number);
        let scratch = (bytes > 0).then(|| self.alloc(bytes, Category::Workspace));
        self.work(work, operands);
        if let Some(scratch) = scratch {
            self.release(scratch);
        }
    }

    /// All kernels share a workspace for the hungriest of them, the one that writes out the patch of every pixel. PyTorch
    /// takes it twice, once to see that it can be had and once to measure, and then gives all cached memory back.
    fn try_all_kernels(
        &mut self,
        convolution: &Convolution,
        extent: &Extent,
        number: Number,
        work: Work,
        operands: [Tensor; 3],
    ) {
        let patch = u64::from(convolution.inputs) * u64::from(convolution.kernel * convolution.kernel);
        let bytes = extent.output / u64::from(convolution.outputs) * patch * number.bytes();
        let tried = self.alloc(bytes, Category::Workspace);
        self.release(tried);
        let workspace = self.alloc(bytes, Category::Workspace);
        self.work(work, operands);
        self.release(workspace);
        self.trace.empty_cache();
    }
}
